"""An error, as the API of the path that it happened at has it."""

from starlette.responses import JSONResponse

from server.openapi import ANTHROPIC_PATHS
from server.protocol.errors import ApiError
from server.protocol.messages.errors import message_error
from server.request_ids import current_request_id

REQUEST_ID_HEADER = "request-id"
"""Anthropic's name for it. It is added to every response of its API, with our own one."""


def failure(path: str, error: ApiError) -> JSONResponse:
    """The response. path: of the request."""
    body = error.body()
    if path.startswith(ANTHROPIC_PATHS):
        body = message_error(error, current_request_id())
    return JSONResponse(body, error.status, error.headers)
