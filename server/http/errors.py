"""HTTP errors: the response to an error, in the shape of the API that the path belongs to."""

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.http.guards.headers import SAFE_HEADERS
from server.protocol.common import current_request_id
from server.protocol.messages.answer import message_error
from server.protocol.ollama.answer import ollama_error
from server.protocol.wire_errors import ApiError
from server.routes.answering import CLIENT_CLOSED_REQUEST
from server.routes.openapi import speaks_anthropic, speaks_ollama

REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for it. It is added to every response of its API, with our own one."""


class ErrorResponse(JSONResponse):
    """The response to an error."""

    def __init__(self, error: ApiError, body: dict[str, Any]) -> None:
        super().__init__(body, error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope.setdefault("state", {}), self._error)
        await super().__call__(scope, receive, send)


def note_error(state: dict[str, Any], error: ApiError) -> None:
    """Note for the log which error a request ends with. state: of its scope."""
    state["error"] = error.code or error.type


def error_response(scope: Scope, error: ApiError) -> ErrorResponse:
    """Make the response to an error. scope: the request's."""
    body = error.body()
    if speaks_anthropic(scope):
        body = message_error(error, current_request_id())
    elif speaks_ollama(scope):
        body = ollama_error(error)
    return ErrorResponse(error, body)


async def answer_with(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error instead of what stands behind a guard."""
    await error_response(scope, error)(scope, receive, send)


def whole_answer(error: ApiError, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the error for a connection that ends with it: status, headers, body."""
    response = error_response({"path": path, "headers": []}, error)
    for name, value in ({"Connection": "close"} | SAFE_HEADERS).items():
        response.headers[name] = value
    return response.status_code, response.raw_headers, bytes(response.body)


def add_error_handlers(app: FastAPI) -> None:
    """Have what routes and the framework raise answered as errors of the path's API."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ApiError(404, "There is nothing at this path.", type="not_found_error")
    elif error.status_code == 405 and request.method == "POST" and _is_unknown(request):
        found = ApiError(404, "There is nothing to ask here.", type="not_found_error")
    elif error.status_code == 405:
        found = ApiError(405, f"This path does not answer {request.method}.")
    else:
        found = ApiError(error.status_code, str(error.detail))
    found.headers.update(error.headers or {})
    return await _api_error(request, found)


def _is_unknown(request: Request) -> bool:
    """Return whether a path is one of OpenAI's that this server does not have. Some look like the
    id of a response here, which can be read or deleted."""
    path: str = request.scope["path"]
    return path.startswith("/v1/responses/")


async def _client_left(_: Request, error: Exception) -> Response:
    """Answer a client that went away while it was still sending: nobody reads the answer."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
