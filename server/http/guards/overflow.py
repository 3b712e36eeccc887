"""Refuse connections beyond the limit, each one at once."""

import asyncio

from server.config import LimitsSection
from server.http.errors import whole_answer
from server.protocol.wire_errors import ApiError, come_back


class OverflowProtocol(asyncio.Protocol):
    """Answer 503 to any request, and read nothing.

    The client's request may still be under way; a connection that is closed with bytes unread is
    reset, and the answer can be lost. So our half is closed, and the client has ``keep_alive_s`` to
    close its own.
    """

    def __init__(self, limits: LimitsSection, others: set["OverflowProtocol"]) -> None:
        """others: all of them that are open."""
        self._limits = limits
        self._others = others
        self._ignored_bytes = 0
        self._end: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer 503; close without an answer where even these connections are too many."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others) >= self._limits.max_connections:
            transport.abort()
            return
        self._others.add(self)
        transport.write(error_bytes(too_many_connections(self._limits.retry_after_s)))
        transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(
            self._limits.keep_alive_s, transport.abort
        )

    def data_received(self, data: bytes) -> None:
        """Ignore what is received, up to a limit."""
        assert self._transport is not None
        self._ignored_bytes += len(data)
        if self._ignored_bytes > self._limits.max_header_bytes:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._others.discard(self)
        if self._end is not None:
            self._end.cancel()


def too_many_connections(retry_after_s: int) -> ApiError:
    """Make the error for clients that have to come again."""
    message = "There are too many connections"
    return come_back(503, message, "too_many_connections", retry_after_s, "server_error")


def error_bytes(error: ApiError) -> bytes:
    """Write the error as a whole HTTP response."""
    _, headers, body = whole_answer(error, "")
    head = b"".join(b"%s: %s\r\n" % field for field in headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + body
