"""Limit the size of bodies, and refuse those that are compressed."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import answer_with
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import ApiError, body_too_large

MAX_DIGITS = 20
PLAIN = ("", "identity")
ENCODED = "The body has a Content-Encoding, such as gzip, which is not read: send it plain."


class BodyLimit:
    """Refuse bodies that are too large: at once where Content-Length says so, else while they
    arrive."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, count: CountRefusal) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what ``receive`` delivers; answer 413 when it is too much, 415 for an encoding."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if Headers(scope=scope).get("content-encoding", "").strip().lower() not in PLAIN:
            # RFC 9110, section 15.5.16.
            headers = {"Accept-Encoding": "identity"}
            error = ApiError(415, ENCODED, code="unsupported_content_encoding", headers=headers)
            await answer_with(error, scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise BodyTooLargeError
            return message

        try:
            if _announced(scope) > self._max_body_bytes:
                raise BodyTooLargeError
            await self._app(scope, counted, send)
        except BodyTooLargeError:
            self._count(Refusal.TOO_LARGE)
            error = body_too_large(self._max_body_bytes)
            if "expect" in Headers(scope=scope):
                error.headers["Connection"] = "close"  # it has asked first, and sends nothing now
            await answer_with(error, scope, receive, send)


def _announced(scope: Scope) -> int:
    """Return the length that the request announces; 0 where it announces none."""
    length = Headers(scope=scope).get("content-length", "")
    return int(length[:MAX_DIGITS]) if length.isascii() and length.isdigit() else 0


class BodyTooLargeError(Exception):
    """Raised where the body is read, caught by the guard around it."""
