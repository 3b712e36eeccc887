"""The responses of guards: an error in its API's shape."""

from starlette.types import Receive, Scope, Send

from server.guards.headers import SAFE_HEADERS
from server.http_errors import error_response
from server.protocol.wire_errors import ApiError


async def answer_with(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error instead of what stands behind a guard."""
    await error_response(scope, error)(scope, receive, send)


def whole_answer(error: ApiError, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the error for a connection that ends with it: status, headers, body."""
    response = error_response({"path": path, "headers": []}, error)
    for name, value in ({"Connection": "close"} | SAFE_HEADERS).items():
        response.headers[name] = value
    return response.status_code, response.raw_headers, bytes(response.body)
