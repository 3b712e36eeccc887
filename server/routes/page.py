"""Serves GET and HEAD of the web page at / and /page/{name}. At /, clients other than browsers get
a text. All files are read at the start. A name in a request is looked up and never becomes a path.
``vendor`` holds libraries of the page, in folders named with versions."""

from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import server
from server.routes.service import Served

INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
VENDORED = "vendor/"
# Headers of every file. The policy allows only DOMPurify to turn text into markup.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    )
}
# Ollama's clients look for this text.
RUNNING = "Ollama is running"
# A file whose path contains a version never changes.
CACHED_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}
ASKED_AGAIN = {"Cache-Control": "no-cache"}
# The answer for "/" depends on the Accept header.
VARY = {"Vary": "Accept"}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, ready to send."""

    content: bytes
    kind: str
    etag: str
    caching: dict[str, str]

    def response(self, request: Request) -> Response:
        """Return the file, or 304 if the client already has the file."""
        headers = HEADERS | VARY | self.caching | {"ETag": self.etag}
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or f"W/{self.etag}" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def add_page_routes(router: APIRouter, served: Served) -> None:
    """Add the routes. If the page is switched off, ``/`` always answers with the plain text."""
    page = read_page() if served.config.server.page else {}
    options: dict[str, Any] = {"methods": ["GET", "HEAD"], "include_in_schema": False}

    async def root(request: Request) -> Response:
        if INDEX in page and wants_html(request.headers.get("accept", "")):
            return page[INDEX].response(request)
        return PlainTextResponse(RUNNING, headers=VARY | {"Server": f"quire/{version('quire')}"})

    async def file(request: Request, name: str) -> Response:
        if name not in page:
            raise HTTPException(404)
        return page[name].response(request)

    router.add_api_route("/", root, **options)
    router.add_api_route("/page/{name:path}", file, **options)


def read_page() -> dict[str, PageFile]:
    """Return all files of the page. The keys are paths below the page's folder."""
    assert server.__file__ is not None
    folder = Path(server.__file__).with_name("page")
    page: dict[str, PageFile] = {}
    for file in folder.rglob("*"):
        if file.suffix in KINDS:  # Skips files such as a desktop's .DS_Store.
            name, content = file.relative_to(folder).as_posix(), file.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:32]}"'
            caching = CACHED_FOREVER if name.startswith(VENDORED) else ASKED_AGAIN
            page[name] = PageFile(content, KINDS[file.suffix], etag, caching)
    return page


def wants_html(accept: str) -> bool:
    """Return True if an Accept header names HTML, as browsers do. ``*/*`` does not count."""
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if kind == "text/html":
            return not any(one.replace(" ", "") in ("q=0", "q=0.0") for one in parameters)
    return False
