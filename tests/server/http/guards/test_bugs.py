from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.http.guards.bugs import BugGuard
from tests.server.harness import Connection, http_client


async def test_a_page_can_read_that_a_route_has_failed(
    app: FastAPI,
) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of the house")

    async with http_client(app) as http:
        response = await http.get("/broken", headers={"Origin": "app://x"})
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


async def test_a_fault_of_the_start_is_not_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no start")

    async def nothing() -> Message:
        raise AssertionError

    async def nowhere(_: Message) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match="no start"):
        await BugGuard(app)({"type": "lifespan"}, nothing, nowhere)
