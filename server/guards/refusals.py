"""How a guard turns something away: an error in its API's shape, and a count of why."""

from collections.abc import Callable
from enum import StrEnum

from starlette.types import Receive, Scope, Send

from server.guards.headers import SAFE_HEADERS
from server.http_errors import error_response
from server.protocol.wire_errors import ApiError


class Refusal(StrEnum):
    """Why something was turned away: the only values that a metric's label takes."""

    HOST = "host"
    ORIGIN = "origin"
    KEY = "key"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    SLOW_READER = "slow_reader"
    BAD_HTTP = "bad_http"
    CONNECTIONS = "connections"
    QUEUE_FULL = "queue_full"
    KEY_SHARE = "key_share"
    DRAINING = "draining"


CountRefusal = Callable[[Refusal], None]


async def answer_with(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """The error instead of whatever stands behind a guard."""
    await error_response(scope, error)(scope, receive, send)


def whole_answer(error: ApiError, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """The error for a connection that ends with it: status, headers, body."""
    response = error_response({"path": path, "headers": []}, error)
    for name, value in ({"Connection": "close"} | SAFE_HEADERS).items():
        response.headers[name] = value
    return response.status_code, response.raw_headers, bytes(response.body)
