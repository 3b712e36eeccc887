"""An error, as the API of the path that it happened at has it."""

from starlette.responses import JSONResponse
from starlette.types import Scope

from server.openapi import speaks_anthropic
from server.protocol.errors import ApiError
from server.protocol.messages.errors import message_error
from server.request_ids import current_request_id

REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for it. It is added to every response of its API, with our own one."""


def failure(scope: Scope, error: ApiError) -> JSONResponse:
    """The response. scope: the request's."""
    body = error.body()
    if speaks_anthropic(scope):
        body = message_error(error, current_request_id())
    return JSONResponse(body, error.status, error.headers)
