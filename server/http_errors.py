"""HTTP errors: the response to an error, in the shape of the API that the path belongs to."""

from starlette.responses import JSONResponse
from starlette.types import Scope

from server.openapi import speaks_anthropic
from server.protocol.messages.errors import message_error
from server.protocol.wire_errors import ApiError
from server.request_ids import current_request_id

REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for it. It is added to every response of its API, with our own one."""


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """Make the response to an error. scope: the request's."""
    body = error.body()
    if speaks_anthropic(scope):
        body = message_error(error, current_request_id())
    return JSONResponse(body, error.status, error.headers)
