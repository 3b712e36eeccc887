"""The page's routes: browsers get files, other programs get one line of text."""

import hashlib
import re
from importlib.resources import as_file, files

import httpx2
import pytest
from structlog.testing import capture_logs

from server.config import Config, ServerSection
from server.routes.page import KINDS, RUNNING, VENDORED, read_page, wants_html
from server.text.tokenizer import Tokenizer
from tests.page.libraries import read_lock
from tests.server.harness import Engine, serving

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NO_PAGE = Config(server=ServerSection(page=False))
FILES = {name: file.content for name, file in read_page().items()}
SOURCES = {n: content.decode() for n, content in FILES.items() if not n.endswith(".woff2")}
OWN = {name: text for name, text in SOURCES.items() if not name.startswith(VENDORED)}
MAX_VENDORED_BYTES = 900_000


async def test_a_browser_gets_the_page_and_everybody_else_what_ollama_says(
    http: httpx2.AsyncClient,
) -> None:
    response = await http.get("/", headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "Accept"
    assert response.text == SOURCES["index.html"]
    for accept in ("*/*", "application/json", ""):
        response = await http.get("/", headers={"accept": accept})
        assert response.text == RUNNING
        assert response.headers["vary"] == "Accept"
    response = await http.head("/")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("name", sorted(FILES))
async def test_files_are_sent_with_their_kind_and_safe_headers(
    http: httpx2.AsyncClient, name: str
) -> None:
    response = await http.get(f"/page/{name}")
    assert response.status_code == 200
    assert response.content == FILES[name]
    assert response.headers["content-type"] == KINDS[name[name.rindex(".") :]]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "font-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in policy
    head = await http.head(f"/page/{name}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == response.headers["etag"]


async def test_what_has_a_version_in_its_path_is_kept_and_all_else_is_asked_for_again(
    http: httpx2.AsyncClient,
) -> None:
    for name in SOURCES:
        caching = (await http.get(f"/page/{name}")).headers["cache-control"]
        if name.startswith(VENDORED):
            assert re.match(r"vendor/[a-z-]+-\d+\.\d+\.\d+/", name)
            assert caching == "public, max-age=31536000, immutable"
        else:
            assert caching == "no-cache"


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
    "path",
    [
        "/page",
        "/page/",
        "/page/nothing.js",
        "/page/../app.py",
        "/page/%2e%2e%2fapp.py",
        "/page/vendor",
        "/page/vendor/",
        "/page/vendor/%2e%2e/style.css",
        "/page//style.css",
    ],
)
async def test_nothing_else_is_served(http: httpx2.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 404


async def test_the_page_can_be_turned_off(engine: Engine, tokenizer: Tokenizer) -> None:
    async with serving(engine.client, tokenizer, NO_PAGE) as (_, http):
        assert (await http.get("/", headers=BROWSER)).text == RUNNING
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
    with as_file(files("server").joinpath("page")) as folder:
        held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert held == set(FILES)


def test_the_libraries_are_those_of_their_lock_and_have_their_licences() -> None:
    packages = read_lock()
    locked = {
        f"{VENDORED}{package['folder']}/{file['as']}": file["sha256"]
        for package in packages
        for file in package["files"].values()
    }
    contents = {n: f.content for n, f in read_page().items() if n.startswith(VENDORED)}
    assert {
        name: hashlib.sha256(content).hexdigest() for name, content in contents.items()
    } == locked
    assert sum(map(len, contents.values())) < MAX_VENDORED_BYTES
    for package in packages:
        assert package["integrity"].startswith("sha512-")
        assert any("LICENSE" in file["as"] for file in package["files"].values()), package["name"]
        assert package["licence"] in ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause")


def test_the_page_asks_nobody_else_and_runs_nothing_inline() -> None:
    for name, text in OWN.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", OWN["index.html"])


def test_only_one_file_makes_elements_of_html() -> None:
    users = {name for name, text in OWN.items() if "vendor/dompurify" in text}
    assert users == {"markdown.js"}
    assert "DOMPurify.sanitize(html, RULES)" in OWN["markdown.js"]


def test_modules_import_only_files_that_are_there() -> None:
    for name, text in OWN.items():
        for imported in re.findall(r"from \"\./([^\"]+)\"", text):
            assert imported in SOURCES, f"{name} imports {imported}"
    used = set(re.findall(r"/page/([\w.]+)", OWN["index.html"]))
    assert used <= set(OWN)


def test_the_folder_of_each_library_is_that_of_its_lock() -> None:
    named = {name for text in OWN.values() for name in re.findall(r"vendor/([\w.-]+\d)", text)}
    assert named == {package["folder"] for package in read_lock()}


def test_fonts_are_those_that_their_style_names() -> None:
    style = next(name for name in SOURCES if name.endswith("/katex.css"))
    named = {
        f"{style.rpartition('/')[0]}/{font}"
        for font in re.findall(r"fonts/[\w-]+.woff2", SOURCES[style])
    }
    assert named == set(FILES) - set(SOURCES)


def test_every_language_that_code_may_be_coloured_in_has_its_grammar() -> None:
    code = OWN["markdown.js"]
    found = re.search(r"LANGUAGES = new Set\(\[(.*?)\]\)", code, re.DOTALL)
    folder = re.search(r'GRAMMARS = "\./(.*)"', code)
    assert found is not None
    assert folder is not None
    languages = re.findall(r'"(\w+)"', found[1])
    grammars = {name for name in SOURCES if name.startswith(folder[1]) and name.endswith(".js")}
    assert {f"{folder[1]}/{language}.js" for language in [*languages, "core"]} == grammars
    others = re.search(r"Object.entries\(\{(.*?)\}\)", code, re.DOTALL)
    assert others is not None
    assert set(re.findall(r': "(\w+)"', others[1])) <= set(languages)


async def test_a_page_that_is_open_leaves_no_line_in_the_log(http: httpx2.AsyncClient) -> None:
    """But the one of /v1/models, which any client asks for its name."""
    with capture_logs() as entries:
        assert (await http.get("/", headers=BROWSER)).status_code == 200
        for name in SOURCES:
            assert (await http.get(f"/page/{name}")).status_code == 200
        for _ in range(5):
            assert (await http.get("/memory")).status_code == 200
        assert (await http.get("/memory", params={"model": "any"})).status_code == 200
    said = [entry for entry in entries if entry["event"] == "request"]
    assert len(said) == 7 + len(SOURCES)
    assert {entry["log_level"] for entry in said} == {"debug"}
