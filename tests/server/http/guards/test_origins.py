from collections.abc import AsyncIterator

import httpx2
import pytest

from engine.client import EngineClient
from server.config import AccessSection, Config, SettingError
from server.http.guards.hosts import METHODS, AllowedOrigins
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, Engine, chat, serving

KEY = "sk-0123456789abcdef"
OURS = (
    "http://localhost",
    "https://localhost",
    "http://localhost:3000",
    "https://LOCALHOST:8443",
    "http://127.0.0.1",
    "http://127.0.0.1:5173",
    "https://127.0.0.1:1",
    "http://127.9.9.9:8080",
    "http://[::1]",
    "http://[::1]:3000",
    "https://[::1]:3000",
    "app://obsidian.md",
    "app://localhost",
    "app://-",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "file://",
    "vscode-webview://0k3v8qg2",
    "vscode-file://vscode-app",
)
NOT_OURS = (
    "null",
    "*",
    "",
    "https://evil.example",
    "http://localhost.evil.example",
    "http://evil-localhost",
    "http://localhost@evil.example",
    "http://127.0.0.1.evil.example",
    "http://evil.tauri.localhost",
    "http://192.168.1.5",
    "http://[fe80::1]",
    "ws://localhost",
    "chrome-extension://abcdef",
    "javascript://localhost",
    "http://localhost:3000/path",
    "http:localhost",
    "//localhost",
    "http://localhost http://evil.example",
    "apps://x",
)


def allowed(*configured: str) -> AllowedOrigins:
    return AllowedOrigins.of(AccessSection(allowed_origins=configured))


@pytest.fixture
async def locked(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    """With a key, and one more origin."""
    config = Config.model_validate(
        {"access": {"api_keys": KEY, "allowed_origins": "https://chat.example/"}}
    )
    async with serving(engine.client, tokenizer, config) as (_, h):
        yield h


@pytest.mark.parametrize("origin", OURS)
async def test_threat_03_a_page_of_this_machine_is_let_in_and_can_read(
    http: httpx2.AsyncClient, origin: str
) -> None:
    response = await http.post(CHAT, json=chat(max_tokens=1), headers={"Origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["vary"] == "Origin"
    assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("origin", NOT_OURS)
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_threat_03_other_pages_are_refused_and_cannot_read(
    http: httpx2.AsyncClient, service: Service, origin: str, method: str
) -> None:
    before = service.client.stats.steps
    preflight = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
    response = await http.request(
        method, CHAT, json=chat(max_tokens=1), headers={"Origin": origin} | preflight
    )
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert service.client.in_flight == 0
    assert service.client.stats.steps == before


async def test_threat_03_two_origins_are_none(http: httpx2.AsyncClient) -> None:
    twice = [("Origin", "http://localhost"), ("Origin", "http://localhost")]
    assert (await http.get("/health", headers=twice)).status_code == 403


async def test_programs_that_are_no_browsers_name_no_origin(http: httpx2.AsyncClient) -> None:
    response = await http.post(CHAT, json=chat(max_tokens=1))
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_origins_can_be_added() -> None:
    origins = allowed("https://chat.example", "https://other.example:443/", "x-app://main")
    for origin in ("https://chat.example", "HTTPS://Chat.Example", "https://other.example"):
        assert origins.has(origin, "localhost")
    assert origins.has("x-app://main", "localhost")
    for origin in ("http://chat.example", "https://chat.example:8443", "x-app://other"):
        assert not origins.has(origin, "localhost")


def test_extensions_of_browsers_are_let_in_by_one_setting() -> None:
    some = ("chrome-extension://abc", "moz-extension://5f", "safari-web-extension://9A")
    for allows in (False, True):
        origins = AllowedOrigins.of(AccessSection(allow_browser_extensions=allows))
        assert all(origins.has(origin, "localhost") == allows for origin in some)
        assert not origins.has("https://chat.example", "localhost")


@pytest.mark.parametrize(
    "text", ["*", "null", "chat.example", "https://*", "https://", "https://a/b"]
)
def test_what_is_no_origin_cannot_be_added(text: str) -> None:
    with pytest.raises(SettingError, match=r"setting access\.allowed_origins: .* is no origin"):
        allowed(text)


def test_a_page_that_came_from_here_may_ask_here() -> None:
    origins = allowed()
    assert origins.has("http://192.168.1.5:8000", "192.168.1.5:8000")
    assert origins.has("https://quire.example", "quire.example")
    assert not origins.has("http://192.168.1.5:9000", "192.168.1.5:8000")
    assert not origins.has("http://192.168.1.6:8000", "192.168.1.5:8000")


# --- what browsers ask before ----------------------------------------------------------------


async def test_a_preflight_is_answered_without_a_key(locked: httpx2.AsyncClient) -> None:
    asked = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type, x-stainless-lang",
        "Access-Control-Request-Private-Network": "true",
    }
    response = await locked.options(CHAT, headers=asked)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    assert response.headers["access-control-allow-methods"] == METHODS
    allowed_headers = response.headers["access-control-allow-headers"]
    assert allowed_headers == asked["Access-Control-Request-Headers"]
    assert response.headers["access-control-allow-private-network"] == "true"
    assert int(response.headers["access-control-max-age"]) > 0


async def test_a_preflight_is_told_no_more_than_it_asks_for(locked: httpx2.AsyncClient) -> None:
    asked = {"Origin": "app://x", "Access-Control-Request-Method": "GET"}
    response = await locked.options("/v1/models", headers=asked)
    assert response.status_code == 204
    assert "access-control-allow-headers" not in response.headers
    assert "access-control-allow-private-network" not in response.headers


@pytest.mark.parametrize("names", ["a b", "a,,b", "a;b", "x" * 3000, "a, b\u00e9"])
async def test_a_preflight_asks_for_names_of_headers(
    locked: httpx2.AsyncClient, names: str
) -> None:
    asked = [
        (b"Origin", b"app://x"),
        (b"Access-Control-Request-Method", b"GET"),
        (b"Access-Control-Request-Headers", names.encode()),
    ]
    assert (await locked.options("/v1/models", headers=asked)).status_code == 400


async def test_options_without_a_question_is_like_any_other_method(
    locked: httpx2.AsyncClient,
) -> None:
    response = await locked.options("/v1/models", headers={"Origin": "app://x"})
    assert response.status_code == 401


@pytest.mark.parametrize(
    ("key", "path", "body", "status"),
    [
        ("", CHAT, b"{}", 401),
        ("sk-wrong-wrong-wrong", CHAT, b"{}", 401),
        (KEY, CHAT, b"{}", 400),
        (KEY, "/v1/nothing", b"{}", 404),
        (KEY, CHAT, b" " * (9 * 1024**2), 413),
        (KEY, "/v1/embeddings", b'{"input": "a"}', 400),
    ],
)
async def test_a_page_can_read_errors_too(
    locked: httpx2.AsyncClient, key: str, path: str, body: bytes, status: int
) -> None:
    headers = {"Origin": "http://localhost:3000", "Authorization": f"Bearer {key}"}
    response = await locked.post(path, content=body, headers=headers)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"


async def test_a_page_can_read_that_it_is_to_come_back_later(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "capacity", 0)
    response = await http.post(CHAT, json=chat(), headers={"Origin": "app://x"})
    assert response.status_code == 429
    assert response.headers["access-control-allow-origin"] == "app://x"
    assert "Retry-After" in response.headers["access-control-expose-headers"]


# --- what browsers fetch without wanting to read -------------------------------------------------


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(("mode", "dest"), [("no-cors", "image"), ("navigate", "iframe")])
async def test_threat_03_what_other_pages_embed_is_refused(
    http: httpx2.AsyncClient, service: Service, site: str, mode: str, dest: str
) -> None:
    fetched = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    before = service.client.stats.generated_tokens
    response = await http.get("/ready", headers=fetched)
    assert response.status_code == 403
    assert service.client.stats.generated_tokens == before


async def test_links_to_us_can_be_followed(http: httpx2.AsyncClient) -> None:
    followed = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for site in ("cross-site", "same-site", "none"):
        response = await http.get("/", headers=followed | {"Sec-Fetch-Site": site})
        assert response.status_code == 200
        form = await http.post(CHAT, headers=followed | {"Sec-Fetch-Site": site})
        assert form.status_code == (400 if site == "none" else 403)


async def test_our_own_page_fetches_what_it_needs(http: httpx2.AsyncClient) -> None:
    own = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
    assert (await http.get("/v1/models", headers=own)).status_code == 200
