"""GET and HEAD / and /page/{name}: the page for people, where browsers ask for one.

Its files are read once, and nothing else below ``server/page`` is ever opened: what a client names
is looked up and never made a path.
"""

from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.routes.operations import who_answers
from server.routes.service import Service

INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Beside those that every answer has.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
# What "/" answers depends on who asks.
VARY = {"Vary": "Accept"}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One of the page's files, as it is sent."""

    content: bytes
    kind: str
    etag: str

    def response(self, request: Request) -> Response:
        """Return the file; 304 where the client has it already."""
        headers = HEADERS | VARY | {"ETag": self.etag}
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or f"W/{self.etag}" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def page_routes(service: Service) -> APIRouter:
    """Return the routes, for one service; without a page ``/`` is the same for all."""
    router = APIRouter()
    page = read_page() if service.config.server.page else {}
    options: dict[str, Any] = {"methods": ["GET", "HEAD"], "include_in_schema": False}

    async def root(request: Request) -> Response:
        if INDEX in page and wants_html(request.headers.get("accept", "")):
            return page[INDEX].response(request)
        return JSONResponse(who_answers(), headers=VARY)

    async def file(request: Request, name: str) -> Response:
        if name not in page:
            raise HTTPException(404)
        return page[name].response(request)

    router.add_api_route("/", root, **options)
    router.add_api_route("/page/{name}", file, **options)
    return router


def read_page() -> dict[str, PageFile]:
    """Return all files of the page, by name."""
    folder = files("server").joinpath("page")
    # A desktop may have put files of its own there.
    served = [file for file in folder.iterdir() if _suffix(file.name) in KINDS]
    found: dict[str, PageFile] = {}
    for file in served:
        content = file.read_bytes()
        etag = f'"{sha256(content).hexdigest()[:32]}"'
        found[file.name] = PageFile(content, KINDS[_suffix(file.name)], etag)
    return found


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def wants_html(accept: str) -> bool:
    """Return whether an Accept header names HTML itself: browsers' do, programs' ``*/*`` does
    not."""
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if kind == "text/html":
            return not any(one.replace(" ", "") in ("q=0", "q=0.0") for one in parameters)
    return False
