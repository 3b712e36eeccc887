"""What browsers get, and what other programs still get."""

import re
from importlib.resources import files

import httpx2
import pytest
from structlog.testing import capture_logs

from server.config import Config, ServerSection
from server.routes.page import KINDS, read_page, wants_html
from server.text.tokenizer import Tokenizer
from tests.server.harness import Engine, http_client, make_service, running

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NO_PAGE = Config(server=ServerSection(page=False))
SOURCES = {name: file.content.decode() for name, file in read_page().items()}


async def test_a_browser_gets_the_page_and_everybody_else_what_they_always_got(
    http: httpx2.AsyncClient,
) -> None:
    response = await http.get("/", headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "Accept"
    assert response.text == SOURCES["index.html"]
    for accept in ("*/*", "application/json", ""):
        response = await http.get("/", headers={"accept": accept})
        assert response.json()["name"] == "quire"
        assert response.headers["vary"] == "Accept"
    response = await http.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", sorted(SOURCES))
async def test_files_are_sent_with_their_kind_and_safe_headers(
    http: httpx2.AsyncClient, name: str
) -> None:
    response = await http.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.text == SOURCES[name]
    assert response.headers["content-type"] == KINDS[name[name.index(".") :]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    head = await http.head(f"/page/{name}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == response.headers["etag"]


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}'])
async def test_who_has_a_file_already_is_not_sent_it_again(
    http: httpx2.AsyncClient, form: str
) -> None:
    etag = (await http.get("/page/style.css")).headers["etag"]
    response = await http.get("/page/style.css", headers={"if-none-match": form.format(etag)})
    assert (response.status_code, response.content) == (304, b"")
    assert response.headers["etag"] == etag
    response = await http.get("/page/style.css", headers={"if-none-match": '"old"'})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/page"]
)
async def test_nothing_else_is_served(http: httpx2.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_the_page_can_be_turned_off(engine: Engine, tokenizer: Tokenizer) -> None:
    async with (
        running(make_service(engine.client, tokenizer, NO_PAGE)) as app,
        http_client(app) as http,
    ):
        assert (await http.get("/", headers=BROWSER)).json()["name"] == "quire"
        assert (await http.get("/page/style.css")).status_code == 404
        assert (await http.get("/memory")).status_code == 200


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (BROWSER["accept"], True),
        ("TEXT/HTML", True),
        ("application/json, text/html;q=0.5", True),
        ("text/html; q=0", False),
        ("text/html;level=1; q = 0.0", False),
        ("text/*", False),
        ("text/htmlx", False),
        ("", False),
    ],
)
def test_html_must_be_asked_for_by_name(accept: str, wanted: bool) -> None:
    assert wants_html(accept) is wanted


def test_the_folder_holds_nothing_that_is_not_served() -> None:
    folder = {file.name for file in files("server").joinpath("page").iterdir()}
    assert folder == set(SOURCES)


def test_the_page_asks_nobody_else_and_runs_nothing_inline() -> None:
    for name, text in SOURCES.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", SOURCES["index.html"])


def test_modules_import_only_files_that_are_there() -> None:
    for name, text in SOURCES.items():
        for imported in re.findall(r"from \"\./([^\"]+)\"", text):
            assert imported in SOURCES, f"{name} imports {imported}"
    used = set(re.findall(r"/page/([\w.]+)", SOURCES["index.html"]))
    assert used <= set(SOURCES)


async def test_a_page_that_is_open_leaves_no_line_in_the_log(http: httpx2.AsyncClient) -> None:
    """But the one of /v1/models, which any client asks for its name."""
    scripts = " ".join(text for name, text in SOURCES.items() if name.endswith(".js"))
    asked = set(re.findall(r'ask\("([^"]+)"\)', scripts))
    assert asked == {"/memory", "/v1/models"}
    with capture_logs() as entries:
        assert (await http.get("/", headers=BROWSER)).status_code == 200
        for name in SOURCES:
            assert (await http.get(f"/page/{name}")).status_code == 200
        for _ in range(5):
            assert (await http.get("/memory")).status_code == 200
    said = [entry for entry in entries if entry["event"] == "request"]
    assert len(said) == 6 + len(SOURCES)
    assert {entry["log_level"] for entry in said} == {"debug"}
