"""An error, as the API of the path that it happened at has it."""

from starlette.responses import JSONResponse

from server.openapi import ANTHROPIC_PATHS
from server.protocol.errors import ApiError
from server.protocol.messages.errors import message_error, new_request_id

REQUEST_ID_HEADER = "request-id"


def failure(path: str, error: ApiError) -> JSONResponse:
    """The response. path: of the request."""
    if not path.startswith(ANTHROPIC_PATHS):
        return JSONResponse(error.body(), error.status, error.headers)
    request_id = new_request_id()
    headers = error.headers | {REQUEST_ID_HEADER: request_id}
    return JSONResponse(message_error(error, request_id), error.status, headers)
