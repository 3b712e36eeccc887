import gzip
import json

import httpx2
import pytest

from server.config import Config, LimitsSection
from server.http.guards import body
from server.protocol.common import limits_by_path
from server.text.tokenizer import Tokenizer
from tests.server.harness import CHAT, Connection, Engine, chat, eventually, serving
from tests.server.metrics.scraping import scrape, value

LIMIT = 2000
POSTED = limits_by_path(LimitsSection())
CHUNKED = [(b"transfer-encoding", b"chunked")]
CONFIG = Config.model_validate({"limits": LimitsSection.model_validate({"max_body_bytes": LIMIT})})


def body_of(size: int) -> bytes:
    """A chat whose body has exactly that many bytes."""
    raw = json.dumps(chat(max_tokens=1, metadata="")).encode()
    return raw.replace(b'"metadata": ""', b'"metadata": "' + b"x" * (size - len(raw)) + b'"')


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(
    engine: Engine, tokenizer: Tokenizer, chunked: bool
) -> None:
    async def pieces(raw: bytes):  # type: ignore[no-untyped-def]
        for start in range(0, len(raw), 500):
            yield raw[start : start + 500]

    async with serving(engine.client, tokenizer, CONFIG) as (_, http):
        for size, status in ((LIMIT, 200), (LIMIT + 1, 413), (100 * LIMIT, 413)):
            raw = body_of(size)
            response = await http.post(CHAT, content=pieces(raw) if chunked else raw)
            assert response.status_code == status
        assert response.json()["error"]["code"] == "body_too_large"
        assert str(LIMIT) in response.json()["error"]["message"]


async def test_a_body_is_refused_before_it_is_all_there(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    async with serving(engine.client, tokenizer, CONFIG) as (app, _):
        connection = Connection(app, CHAT, b"x" * (LIMIT + 1), ends=False, headers=CHUNKED)
        await connection.begins()
        assert connection.status == 413
        assert not connection.done, "the rest is on its way"
        connection.send_more(b"x" * LIMIT)
        await connection.end()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((path, '"code":"bodies_too_large"') for path in (CHAT, "/v1/responses", "/tokenize")),
        *(("/v1/completions", "server_error"), ("/v1/messages", "overloaded_error")),
        ("/api/chat", '{"error":"The bodies of all requests'),
    ],
)
async def test_bodies_that_are_held_back_take_no_more_than_all_bodies_may(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, told: str
) -> None:
    monkeypatch.setattr(body, "MAX_ALL_BODIES_BYTES", 2 * LIMIT + LIMIT // 2)
    async with serving(engine.client, tokenizer, CONFIG) as (app, http):
        held = [Connection(app, CHAT, b" " * LIMIT, ends=False, headers=CHUNKED) for _ in range(2)]
        await eventually(lambda: all(connection.is_taken for connection in held))
        refused = await http.post(path, json={"x": "x" * (LIMIT - 100)})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert told in refused.text
        assert (await http.post(CHAT, json=chat(max_tokens=1))).status_code == 200, "it is small"
        for connection in held:
            connection.leave()
            await connection.end()
            for _ in range(5):
                assert (await http.post(CHAT, content=body_of(LIMIT))).status_code == 200
        samples = await scrape(http)
        assert value(samples, "quire_refused_requests_total", reason="bodies") == 1


async def test_the_default_limit_holds(http: httpx2.AsyncClient) -> None:
    response = await http.post(CHAT, content=b" " * (8 * 1024**2 + 1))
    assert response.status_code == 413


@pytest.mark.parametrize("path", [*POSTED, "/nowhere"])
async def test_a_body_that_is_compressed_is_refused_by_name(
    http: httpx2.AsyncClient, path: str
) -> None:
    body = gzip.compress(b"{}")
    for encoding in ("gzip", "deflate", "br", "ZSTD", "gzip, identity", "x"):
        response = await http.post(path, content=body, headers={"Content-Encoding": encoding})
        assert (encoding, response.status_code) == (encoding, 415)
        assert "Content-Encoding" in response.text
        assert response.headers["accept-encoding"] == "identity"
    plain = await http.post(path, content=b"{}", headers={"Content-Encoding": "Identity"})
    assert plain.status_code != 415
