"""Makes HTTP errors in the format of the API at the path. Defines and adds security headers."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from server.protocol.common import current_request_id
from server.protocol.messages.answer import message_error
from server.protocol.ollama.answer import ollama_error
from server.protocol.wire_errors import ApiError
from server.routes.openapi import speaks_anthropic, speaks_ollama

SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def adding(headers: Mapping[str, str], send: Send) -> Send:
    """Return a ``send`` that adds ``headers`` to each response, unless the response has them."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            own = MutableHeaders(scope=message)
            for name, value in headers.items():
                own.setdefault(name, value)
            message["headers"] = own.raw
        await send(message)

    return sent


# Beginning of a path that other servers have -> what to do instead.
INSTEAD = {
    "/api/pull": "quire downloads no model on request: run `quire pull NAME` on its machine.",
    "/api/delete": "quire removes no model on request: run `quire rm NAME` on its machine.",
    "/api/copy": "quire copies no models: its setting models.aliases gives them more names.",
    "/v1/audio": "quire reads and writes text: have your client use another server for audio.",
}
STORED = "/v1/responses/"
CLIENT_CLOSED_REQUEST = 499
REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for the header with the request id, for responses of Anthropic's API."""


def note_error(state: dict[str, Any], error: ApiError) -> None:
    """Store an error's code for the log in ``state``, which is a part of the ASGI scope."""
    state["error"] = error.code or error.type


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """Return an error in the format of the path's API, and store its code for the log."""
    body = error.body()
    if speaks_anthropic(scope):
        body = message_error(error, current_request_id())
    elif speaks_ollama(scope):
        body = ollama_error(error)
    note_error(scope.setdefault("state", {}), error)
    return JSONResponse(body, error.status, error.headers)


async def answer_with(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(scope, error)(scope, receive, send)


def whole_answer(error: ApiError, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error response that closes the connection."""
    response = error_response({"path": path, "headers": []}, error)
    for name, value in ({"Connection": "close"} | SAFE_HEADERS).items():
        response.headers[name] = value
    return response.status_code, response.raw_headers, bytes(response.body)


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors of routes and of the framework in the format of the path's API."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    if error.status_code == 404:
        near = (text for start, text in INSTEAD.items() if path.startswith(start))
        text = next(near, "There is nothing at this path.")
        answer = ApiError(404, text, type="not_found_error")
    elif (request.method, error.status_code) == ("POST", 405) and path.startswith(STORED):
        # The route of stored responses, which has only GET and DELETE, matches paths of OpenAI's
        # API that this server lacks.
        answer = ApiError(404, "There is nothing to ask here.", type="not_found_error")
    elif error.status_code == 405:
        answer = ApiError(405, f"This path does not answer {request.method}.")
    else:
        answer = ApiError(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return await _api_error(request, answer)


async def _client_left(_: Request, error: Exception) -> Response:
    """Return a response for a closed connection. The client does not receive it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
