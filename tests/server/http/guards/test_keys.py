import hmac
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from server.config import AccessSection, Config, SettingError
from server.http.guards.keys import Keys
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, Connection, Engine, chat, http_client, serving

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"
SCRAPE = "scrape-0123456789"
OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/api/hello")}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
ODD_PATHS = (
    "//",
    "//health",
    "/health/",
    "/health/x",
    "/health%2f",
    "/healt%68",
    "/%2fhealth",
    "//v1/models",
    "/v1//models",
    "/v1%2fmodels",
    "/V1/models",
    "/page",
    "/page/",
    "/page//x",
    "/page/../v1/models",
    "/page/%2e%2e/v1/models",
    "/page/..%2fv1/models",
    "/page/./x",
    "/pages/x",
    "/docs",
    "/nowhere",
    "*",
)


@pytest.fixture
async def locked(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[FastAPI]:
    config = Config.model_validate({"access": {"api_keys": [OTHER, KEY], "scrape_key": SCRAPE}})
    async with serving(engine.client, tokenizer, config) as (app, _):
        yield app


def paths_of(app: FastAPI) -> Iterator[str]:
    yield from app.openapi()["paths"]
    for route in app.routes:
        if isinstance(route, Route):
            yield route.path


async def status_of(app: FastAPI, method: str, path: str, *headers: tuple[bytes, bytes]) -> int:
    connection = Connection(app, path, b"{}", method=method, headers=headers)
    await connection.end()
    assert connection.status is not None
    return connection.status


async def test_threat_04_every_path_and_method_needs_the_key(locked: FastAPI) -> None:
    paths = {*paths_of(locked), *ODD_PATHS}
    assert {CHAT, "/metrics", "/ready", "/v1/models", "/openapi.json"} <= paths
    for path in paths:
        for method in METHODS:
            expected = (method, path) in OPEN
            assert (await status_of(locked, method, path) != 401) == expected, (method, path)


async def test_threat_04_a_path_in_disguise_is_not_open(locked: FastAPI) -> None:
    """As uvicorn tells it: decoded, and as it came."""
    for path, raw in (("/health", b"/healt%68"), ("/page/x", b"/page/%78"), ("/", b"/%2e")):
        connection = Connection(locked, path, b"", method="GET", raw_path=raw)
        await connection.end()
        assert connection.status == 401


async def test_the_page_and_its_files_are_open(locked: FastAPI) -> None:
    for path in ("/", "/page/app.js", "/page/css/page.css"):
        assert await status_of(locked, "GET", path) in (200, 404)
        assert await status_of(locked, "POST", path) == 401


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", f"Bearer {KEY}", 200),
        ("authorization", f"bearer   {OTHER} ", 200),
        ("Authorization", f"Bearer \t{KEY}\t ", 200),
        ("Authorization", f"Bearer \xa0{KEY}", 401),
        ("Authorization", f"Bearer {KEY}\x85", 401),
        ("x-api-key", KEY, 200),
        ("x-api-key", f" \t{KEY} ", 200),
        ("x-api-key", f"{KEY}\xa0", 401),
        ("x-api-key", f"\x1f{KEY}", 401),
        ("X-API-Key", OTHER, 200),
        ("Authorization", KEY, 401),
        ("Authorization", f"Basic {KEY}", 401),
        ("Authorization", f"Bearer {KEY}x", 401),
        ("Authorization", f"Bearer {KEY[:-1]}", 401),
        ("Authorization", f"Bearer {KEY.upper()}", 401),
        ("Authorization", "Bearer", 401),
        ("Authorization", "Bearer ", 401),
        ("Authorization", "Bearer caf\u00e9", 401),
        ("x-api-key", "", 401),
        ("api-key", KEY, 401),
        ("Cookie", f"key={KEY}", 401),
    ],
)
async def test_a_key_comes_as_a_bearer_token_or_as_anthropics_clients_send_it(
    locked: FastAPI, header: str, value: str, status: int
) -> None:
    sent = (header.lower().encode(), value.encode("latin-1"))
    assert await status_of(locked, "GET", "/v1/models", sent) == status


async def test_a_key_in_the_query_is_none(locked: FastAPI) -> None:
    async with http_client(locked) as http:
        assert (await http.get(f"/v1/models?key={KEY}&api_key={KEY}")).status_code == 401


async def test_the_key_that_says_who_asks_is_the_one_that_counts(locked: FastAPI) -> None:
    """Else a client with one key could be as many tenants as it likes."""
    bearer, api_key = (b"authorization", b"Bearer anybody"), (b"x-api-key", KEY.encode())
    assert await status_of(locked, "GET", "/v1/models", bearer, api_key) == 401


async def test_the_scrape_key_opens_the_metrics_alone(locked: FastAPI) -> None:
    sent = (b"authorization", f"Bearer {SCRAPE}".encode())
    assert await status_of(locked, "GET", "/metrics", sent) == 200
    for method, path in (("POST", "/metrics"), ("GET", "/v1/models"), ("GET", "/ready")):
        assert await status_of(locked, method, path, sent) == 401
    sent = (b"authorization", f"Bearer {KEY}".encode())
    assert await status_of(locked, "GET", "/metrics", sent) == 200


async def test_a_refusal_has_the_shape_of_its_api_and_repeats_no_key(locked: FastAPI) -> None:
    async with http_client(locked) as http:
        for path in (CHAT, "/v1/messages"):
            response = await http.post(path, json=chat(), headers={"x-api-key": "sk-wrong-wrong"})
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert "wrong" not in response.text
        assert response.json()["error"]["type"] == "authentication_error"
        missing = await http.post(CHAT, json=chat())
        assert missing.json()["error"]["code"] == "missing_api_key"


async def test_keys_are_in_no_metric(locked: FastAPI) -> None:
    async with http_client(locked) as http:
        for key in (KEY, "sk-wrong-wrong-wrong"):
            await http.post(CHAT, json=chat(max_tokens=1), headers={"x-api-key": key})
        text = (await http.get("/metrics", headers={"x-api-key": SCRAPE})).text
    assert 'quire_refused_requests_total{reason="key"} 1.0' in text
    for key in (KEY, OTHER, SCRAPE, "wrong"):
        assert key not in text


async def test_without_keys_everybody_is_in(http: httpx2.AsyncClient) -> None:
    for headers in ({}, {"Authorization": "Bearer anything"}):
        response = await http.post(CHAT, json=chat(max_tokens=1), headers=headers)
        assert response.status_code == 200


def test_all_keys_are_compared_and_none_by_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Keys.of(AccessSection.model_validate({"api_keys": [KEY, OTHER], "scrape_key": SCRAPE}))
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def noted(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    assert found.has(KEY, "/", "GET")
    assert not found.has("x", "/", "GET")
    assert compared == [(32, 32)] * 6
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ({"api_keys": [KEY, "short"]}, r"setting access\.api_keys: key 2 has 5 characters"),
        ({"scrape_key": "short"}, r"setting access\.scrape_key: it has 5 characters"),
        ({"api_keys": ["k\u00e9y" * 16]}, "no header can carry"),
        ({"api_keys": ["two words " * 4]}, "no header can carry"),
        ({"api_keys": ["line\n" * 4]}, "no header can carry"),
    ],
)
def test_a_key_that_cannot_protect_is_refused(access: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Keys.of(AccessSection.model_validate(access))
