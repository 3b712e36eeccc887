from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Message

from server.http.errors import SAFE_HEADERS, adding
from tests.server.harness import Connection, http_client


async def sent(*messages: Message) -> list[Message]:
    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    for message in messages:
        await adding(SAFE_HEADERS, send)(message)
    return found


async def test_every_answer_gets_them_and_its_own_win() -> None:
    own = {"type": "http.response.start", "headers": [(b"cache-control", b"no-cache")]}
    body = {"type": "http.response.body", "body": b"x"}
    start, after = await sent(own, body)
    headers = dict(start["headers"])
    assert headers[b"cache-control"] == b"no-cache"
    assert len(headers) == len(SAFE_HEADERS)
    assert after == body
    (bare,) = await sent({"type": "http.response.start"})
    assert len(bare["headers"]) == len(SAFE_HEADERS)


async def test_a_page_can_read_that_a_route_has_failed(app: FastAPI, broken: str) -> None:
    async with http_client(app) as http:
        response = await http.get(broken, headers={"Origin": "app://x"})
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == "app://x"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "secret" not in response.text


async def test_an_answer_that_has_begun_breaks_off(app: FastAPI) -> None:
    @app.get("/half")
    async def half() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError

        return StreamingResponse(pieces())

    connection = Connection(app, "/half", b"", method="GET")
    await connection.end()
    assert connection.status == 200
    assert connection.body == b"half"
