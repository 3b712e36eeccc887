"""Adds deadlines and limits to the connections of uvicorn's HTTP/1.1 protocol.

::

    opened .. first byte .. request complete .. answer ............ idle .. next request
    | max_receive_s ------------------------ |  | max_reader_stall_s | keep_alive_s | max_receive_s

A client that closes its sending half of the connection counts as gone: its request is cancelled.
"""

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.config import LimitsSection
from server.http.errors import note_error, whole_answer
from server.metrics import HttpMetrics
from server.metrics.requests import Refusal
from server.protocol.wire_errors import ApiError, come_back

# Maximum size of a request's head, which is the request line and the headers.
MAX_HEADER_BYTES = 65536


class OverflowProtocol(asyncio.Protocol):
    """A connection beyond max_connections. It answers 503 at once and reads no request. Closing a
    connection with unread bytes resets it and can lose the answer. Therefore only the sending
    half is closed, and the client has ``keep_alive_s`` to close the other half."""

    def __init__(self, limits: LimitsSection, others: set["OverflowProtocol"]) -> None:
        """``others`` are all open connections of this class."""
        self._limits = limits
        self._others = others
        self._ignored_bytes = 0
        self._end: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer 503, or close without an answer if too many connections are being refused."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others) >= self._limits.max_connections:
            transport.abort()
            return
        self._others.add(self)
        _, headers, body = whole_answer(too_many_connections(), "")
        head = b"".join(b"%s: %s\r\n" % field for field in headers)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + body)
        transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(
            self._limits.keep_alive_s, transport.abort
        )

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._ignored_bytes += len(data)
        if self._ignored_bytes > MAX_HEADER_BYTES:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        if self._end is not None:
            self._end.cancel()


def too_many_connections() -> ApiError:
    message = "There are too many connections"
    return come_back(503, message, "too_many_connections")


# While a request is being answered, at most this many bytes of later requests are read.
MAX_AHEAD_BYTES = 65536
INCOMPLETE = (h11.IDLE, h11.SEND_BODY)
"""h11's states of a client whose request is not complete."""
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits and lists that all connections of a server share."""

    limits: LimitsSection
    metrics: HttpMetrics
    overflow: set[OverflowProtocol] = field(default_factory=set)
    """Open connections beyond max_connections, which are being refused."""
    incomplete: dict["GuardedProtocol", float] = field(default_factory=dict)
    """``{connection that waits for a complete request: start of the wait}``, earliest first."""


class Alarm:
    """A timer that calls a function once after a delay and can be cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        assert self._timer is None
        self._timer = loop.call_later(delay_s, self._ring)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._call()


class GuardedProtocol(H11Protocol):
    """A client's connection, with deadlines for requests and for the reading of answers."""

    rules: ClassVar[Rules]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline = Alarm(self._is_late)
        """Calls ``_is_late`` if a request is not complete in time."""
        self._stall = Alarm(self._look_at_reader)
        """Calls ``_look_at_reader`` regularly while the client should read an answer."""
        self._untaken_bytes = 0
        self._unwanted_bytes = 0
        """Bytes of the current request's body that came after the answer."""

    # --- the life of a connection ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve the connection, or let OverflowProtocol do so if there are too many connections."""
        if len(self.connections) >= self.rules.limits.max_connections and not self._make_room():
            self.rules.metrics.count_refusal(Refusal.CONNECTIONS)
            other = OverflowProtocol(self.rules.limits, self.rules.overflow)
            transport.set_protocol(other)
            other.connection_made(transport)
            return
        super().connection_made(transport)
        self.rules.metrics.connection_opened()
        # Each write now waits until the system has taken all bytes. So a client that does not read
        # is noticed, and keeps at most one write in memory.
        transport.set_write_buffer_limits(high=0)
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.rules.metrics.connection_closed()
        self.rules.incomplete.pop(self, None)
        self._deadline.cancel()
        self._stall.cancel()

    def data_received(self, data: bytes) -> None:
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self.conn.their_state is h11.SEND_BODY:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > self.rules.limits.max_body_bytes:
                self._reset()
                return
        super().data_received(data)
        self._watch_request()
        self._keep_listening()

    def on_response_complete(self) -> None:
        """Set a deadline for the next request, a part of which may have arrived."""
        super().on_response_complete()
        self._unwanted_bytes = 0
        self._watch_request()

    # --- deadlines of incomplete requests -------------------------------------------------------

    def _watch_request(self) -> None:
        """Set the deadline when a request begins, and cancel it when the request is complete."""
        now, incomplete = self.loop.time(), self.rules.incomplete
        if self.transport.is_closing() or not self._receives:
            self._deadline.cancel()
        elif not self._deadline.is_set:
            self._deadline.set(self.loop, self.rules.limits.max_receive_s)
            incomplete.pop(self, None)  # moves to the end below: the request begins now
        if self.transport.is_closing() or self.conn.their_state not in INCOMPLETE:
            incomplete.pop(self, None)
        else:
            incomplete.setdefault(self, now)

    @property
    def _receives(self) -> bool:
        """True if a request must arrive within max_receive_s. False between two requests."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or self._has_bytes
        return self.conn.their_state is h11.SEND_BODY

    @property
    def _has_bytes(self) -> bool:
        """True if a part of a request's head has arrived."""
        return bool(self.conn.trailing_data[0])

    def _is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and not self._has_bytes:
            self.transport.close()  # No request came: browsers open connections in advance.
            return
        self.rules.metrics.count_refusal(Refusal.TOO_SLOW)
        late = f"The request was not complete after {self.rules.limits.max_receive_s:g} s."
        self._answer(ApiError(408, late, code="request_timeout"))

    def _keep_listening(self) -> None:
        """Keep reading while a pipelined request waits, so that uvicorn notices a disconnect."""
        is_ahead = self.flow.read_paused and self.conn.their_state is h11.DONE
        if is_ahead and len(self.conn.trailing_data[0]) <= MAX_AHEAD_BYTES:
            self.flow.resume_reading()

    # --- room for new connections ---------------------------------------------------------------

    def _make_room(self) -> bool:
        """Close a connection that has waited long for a request. Return False if there is none."""
        latest = self.loop.time() - self.rules.limits.crowded_receive_s
        for other, since in self.rules.incomplete.items():
            if since > latest:
                break
            # Skip a connection whose last answer is still being sent.
            if not other.transport.get_write_buffer_size():
                other.give_way()
                return True
        return False

    def give_way(self) -> None:
        del self.rules.incomplete[self]
        if self._receives:
            self.rules.metrics.count_refusal(Refusal.CONNECTIONS)
            self._answer(too_many_connections())
        else:
            self.transport.close()  # Between two requests: the client may connect again.

    # --- clients that do not read their answers -------------------------------------------------

    def pause_writing(self) -> None:
        """Start checking that the client reads, because the socket's buffer is full."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop checking that the client reads, because the socket's buffer is empty again."""
        super().resume_writing()
        self._stall.cancel()

    def _watch_reader(self) -> None:
        self._untaken_bytes = self.transport.get_write_buffer_size()
        self._stall.set(self.loop, self.rules.limits.max_reader_stall_s)

    def _look_at_reader(self) -> None:
        """Reset the connection if the client has read nothing since the last check. Nothing is
        written between two checks, so a shorter buffer means that the client has read."""
        if self.transport.get_write_buffer_size() < self._untaken_bytes:
            self._watch_reader()
        else:
            self.rules.metrics.count_refusal(Refusal.SLOW_READER)
            self._reset()

    # --- ends of a connection -------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, or a head that is too large."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        self.rules.metrics.count_refusal(Refusal.BAD_HTTP)
        text = "This is no HTTP request that can be answered."
        if status == 431:
            text = f"The request's head is larger than {MAX_HEADER_BYTES} bytes."
        self._answer(ApiError(status, text, code="invalid_http"))

    def _answer(self, error: ApiError) -> None:
        """Send an error and close the connection. If an answer has begun, reset the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._reset()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # This makes a route that waits for the body act as if the client had left.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        path = ""
        if self.conn.our_state is h11.SEND_RESPONSE:
            note_error(self.scope["state"], error)
            path = self.scope["path"]
        status, headers, body = whole_answer(error, path)
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _reset(self) -> None:
        """Reset the connection. The system then drops the bytes that the client has not read."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


def guarded_protocol(limits: LimitsSection, metrics: HttpMetrics) -> type[GuardedProtocol]:
    class ServerProtocol(GuardedProtocol):
        rules = Rules(limits, metrics)

    return ServerProtocol
