"""Limits the size of request bodies, and refuses compressed bodies."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import answer_with
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import ApiError, body_too_large, come_back

# At most this many bytes of an unread body are discarded before the answer ends.
MAX_UNREAD_BYTES = 64 * 1024**2


class UnreadBody:
    """Reads and discards the rest of a body before the answer ends. Most clients send the whole
    body before they read the answer. Closing the connection early would lose the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _brings_a_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def watched() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        async def held(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                unread = 0
                while not is_read and unread < MAX_UNREAD_BYTES:
                    unread += len((await watched()).get("body", b""))
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, watched, held)


def _brings_a_body(scope: Scope) -> bool:
    """Return True if a body will come. A client that sent ``Expect`` sends no body if refused."""
    headers = Headers(scope=scope)
    is_long = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return is_long and "expect" not in headers


MAX_DIGITS = 20
PLAIN = ("", "identity")
ENCODED = "The body has a Content-Encoding, such as gzip, which is not read: send it plain."
ALL_TOO_LARGE = "The bodies of all requests together are too large"
# Limit of the memory for all requests' bodies together. A larger max_body_bytes takes its place.
MAX_ALL_BODIES_BYTES = 256 * 1024**2


class BodyLimit:
    """Refuses a body that is larger than ``max_body_bytes`` (413) or encoded (415), and a body that
    exceeds the memory limit together with the bodies of other requests (503)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, count: CountRefusal) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._count = count
        self._held_bytes = 0
        """Size of all bodies in memory. A request's body counts until its answer has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if Headers(scope=scope).get("content-encoding", "").strip().lower() not in PLAIN:
            # In a 415, this header names the allowed encoding: RFC 9110, section 15.5.16.
            headers = {"Accept-Encoding": "identity"}
            error = ApiError(415, ENCODED, code="unsupported_content_encoding", headers=headers)
            await answer_with(error, scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            size = len(message.get("body", b""))
            received += size
            self._held_bytes += size
            if received > self._max_body_bytes:
                raise self._too_large()
            if self._held_bytes > max(MAX_ALL_BODIES_BYTES, self._max_body_bytes):
                error = come_back(503, ALL_TOO_LARGE, "bodies_too_large")
                raise BodyRefusedError(Refusal.BODIES, error)
            return message

        try:
            if _announced(scope) > self._max_body_bytes:
                raise self._too_large()
            await self._app(scope, counted, send)
        except BodyRefusedError as refused:
            self._count(refused.reason)
            if "expect" in Headers(scope=scope):
                # A client that sent Expect waits for permission, and sends no body if refused.
                refused.error.headers["Connection"] = "close"
            await answer_with(refused.error, scope, receive, send)
        finally:
            self._held_bytes -= received

    def _too_large(self) -> "BodyRefusedError":
        return BodyRefusedError(Refusal.TOO_LARGE, body_too_large(self._max_body_bytes))


def _announced(scope: Scope) -> int:
    """Return the Content-Length, or 0 if the header is missing or invalid."""
    length = Headers(scope=scope).get("content-length", "")
    return int(length[:MAX_DIGITS]) if length.isascii() and length.isdigit() else 0


class BodyRefusedError(Exception):
    """Raised while a route reads the body. BodyLimit, around the route, turns it into an answer."""

    def __init__(self, reason: Refusal, error: ApiError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
