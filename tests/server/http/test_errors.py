import json
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.types import Message

from server.http.errors import SAFE_HEADERS, adding, error_response
from server.protocol.wire_errors import overloaded
from tests.server.harness import Connection, http_client


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x"])
def test_anthropics_paths_have_anthropics_errors(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    body = json.loads(bytes(response.body))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert body["type"] == "error"
    assert body["error"]["type"] == "rate_limit_error"
    assert body["request_id"].startswith("req_")


@pytest.mark.parametrize("path", ["/api/chat", "/api/pull", "/api/"])
def test_ollamas_paths_have_ollamas_errors(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    assert json.loads(bytes(response.body)) == {"error": "The queue is full; try again later."}
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1", "/", "/api", "/apis/chat"])
def test_all_others_have_openais(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    assert json.loads(bytes(response.body))["error"]["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert "request-id" not in response.headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/models"])
def test_where_both_apis_have_a_path_a_header_tells_them_apart(path: str) -> None:
    for headers, kind in (([], "error"), ([(b"anthropic-version", b"2023-06-01")], "type")):
        response = error_response({"path": path, "headers": headers}, overloaded())
        assert next(iter(json.loads(bytes(response.body)))) == kind


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
