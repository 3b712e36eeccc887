"""One connection by a clock that the test moves; tests/abuse has the same over sockets."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.config import LimitsSection
from server.http.guards.connections import MAX_AHEAD_BYTES, GuardedProtocol, guarded_protocol
from server.metrics import Metrics
from server.metrics.requests import Refusal

LIMITS = LimitsSection.model_validate(
    {"max_receive_s": 10, "max_reader_stall_s": 30, "max_body_bytes": 1000, "keep_alive_s": 5}
)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LENGTH = [(b"content-length", b"4")]
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


class Timer:
    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s, self.call, self.over = at_s, call, False

    def cancel(self) -> None:
        self.over = True


class Loop:
    """Tasks are the running loop's; time is the test's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, call))
        return self.timers[-1]

    def create_task(self, work: Any) -> Any:
        return asyncio.get_running_loop().create_task(work)

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds
        for timer in list(self.timers):
            if not timer.over and timer.at_s <= self.now_s:
                timer.over = True
                timer.call()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended: str | None = None
        self.untaken = 0
        self.high: int | None = None

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    def is_closing(self) -> bool:
        return self.ended is not None

    def pause_reading(self) -> None:
        """What is there is there."""

    def resume_reading(self) -> None:
        """The test says when there is more."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.untaken


class One:
    """A connection and all around it."""

    def __init__(self, app: Any = None) -> None:
        self.refusals: list[Refusal] = []
        self.open = 0
        self.loop, self.state = Loop(), ServerState()
        self.answering = asyncio.Event()
        self._config = uvicorn.Config(
            app or self.answer, lifespan="off", log_config=None, ws="none", interface="asgi3"
        )
        self._made = guarded_protocol(LIMITS, cast(Metrics, self))
        self.protocol = self.another()
        self.transport: Transport = cast(Any, self.protocol.transport)

    def another(self, transport: Transport | None = None) -> GuardedProtocol:
        """A further connection to the same server."""
        protocol = self._made(
            config=self._config,
            server_state=self.state,
            app_state={},
            _loop=cast(Any, self.loop),
        )
        protocol.connection_made(transport or Transport())
        return protocol

    def fill(self) -> None:
        """There are as many others as there may be, and all have asked."""
        self.state.connections.update(cast(Any, range(LIMITS.max_connections)))

    def count_refusal(self, reason: Refusal) -> None:
        self.refusals.append(reason)

    def connection_opened(self) -> None:
        self.open += 1

    def connection_closed(self) -> None:
        self.open -= 1

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Once the test lets it."""
        await self.answering.wait()
        await send({"type": "http.response.start", "status": 200, "headers": LENGTH})
        await send({"type": "http.response.body", "body": b"done"})

    async def answered(self) -> None:
        self.answering.set()
        async with asyncio.timeout(20):
            while self.state.tasks:
                await asyncio.sleep(0)


async def test_a_connection_that_asks_for_nothing_is_closed_without_a_word() -> None:
    one = One()
    one.loop.pass_by(9.9)
    assert one.transport.ended is None
    one.loop.pass_by(0.1)
    assert [one.transport.ended, one.transport.written] == ["closed", b""]
    assert one.refusals == []


async def test_between_requests_a_connection_has_the_time_of_an_idle_one() -> None:
    one = One()
    one.protocol.data_received(GET)
    await one.answered()
    one.loop.pass_by(5)
    assert one.transport.ended == "closed"
    assert one.refusals == []


async def test_a_body_that_comes_after_its_answer_is_cut_off() -> None:
    one = One()
    one.protocol.data_received(POST % 5000)
    await one.answered()
    one.protocol.data_received(b"x" * 1000)
    assert one.transport.ended is None
    one.protocol.data_received(b"x")
    assert one.transport.ended == "aborted"


async def test_and_so_is_one_that_does_not_come_to_its_end() -> None:
    one = One()
    one.protocol.data_received(POST % 500)
    await one.answered()
    one.protocol.data_received(b"x")
    one.loop.pass_by(10)
    assert one.transport.ended is not None
    assert one.transport.written.count(b"HTTP/1.1") == 1


async def test_a_reader_that_takes_nothing_is_reset() -> None:
    one = One()
    assert one.transport.high == 0
    one.protocol.data_received(GET)
    one.transport.untaken = 100
    one.protocol.pause_writing()
    one.loop.pass_by(30)
    assert one.transport.ended == "aborted"
    assert one.refusals == [Refusal.SLOW_READER]
    one.protocol.connection_lost(None)
    await one.answered()


async def test_a_reader_that_takes_a_little_is_waited_for() -> None:
    one = One()
    one.protocol.data_received(GET)
    one.transport.untaken = 100
    one.protocol.pause_writing()
    for left in (99, 50, 1):
        one.transport.untaken = left
        one.loop.pass_by(30)
        assert one.transport.ended is None
    one.protocol.resume_writing()
    one.loop.pass_by(300)
    assert one.refusals == []
    await one.answered()


async def test_timers_end_with_their_connection() -> None:
    one = One()
    one.protocol.data_received(GET[:5])
    one.transport.untaken = 1
    one.protocol.pause_writing()
    one.protocol.connection_lost(ConnectionResetError())
    assert all(timer.over for timer in one.loop.timers)


async def test_what_is_asked_ahead_is_read_as_far_as_it_is_little() -> None:
    one = One()
    one.protocol.data_received(GET)
    one.protocol.data_received(GET)
    assert not one.protocol.flow.read_paused
    one.protocol.data_received(b"x" * MAX_AHEAD_BYTES)
    assert one.protocol.flow.read_paused
    one.answering.set()


async def test_a_head_without_an_end_is_too_large() -> None:
    one = One()
    one.protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000)
    assert one.transport.written.startswith(b"HTTP/1.1 431 ")
    assert one.transport.ended == "closed"
    assert one.refusals == [Refusal.BAD_HTTP]


async def test_whoever_waits_for_a_body_is_told_when_it_is_no_body() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])

    one = One(app)
    one.protocol.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    one.protocol.data_received(b"no chunk\r\n")
    assert one.transport.written.startswith(b"HTTP/1.1 400 ")
    await one.answered()
    assert seen == ["http.disconnect"]


class Refused(Transport):
    """Of a newcomer whom there is no place for."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Any] = []

    def set_protocol(self, protocol: Any) -> None:
        self.others.append(protocol)

    def write_eof(self) -> None:
        """Nothing more is said."""


def is_refused(one: One) -> bool:
    """Whether one more connection is told that there are too many."""
    newcomer = Refused()
    one.another(newcomer)
    for other in newcomer.others:
        assert newcomer.written.startswith(b"HTTP/1.1 503 ")
        other.connection_lost(None)
    return bool(newcomer.others)


@pytest.mark.parametrize("part", [b"", GET[:-2], POST % 5, POST % 5 + b"abcd"])
async def test_who_has_not_asked_for_a_while_gives_way_to_a_newcomer(part: bytes) -> None:
    one = One()
    if part:
        one.protocol.data_received(part)
    one.fill()
    one.loop.pass_by(0.49)
    assert is_refused(one)
    one.loop.pass_by(0.01)
    assert not is_refused(one)
    assert one.transport.ended == "closed"
    assert one.transport.written.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in one.transport.written
    assert one.refusals == [Refusal.CONNECTIONS] * 2
    # It gives way once, and the newcomer may be about to ask.
    assert is_refused(one)
    await one.answered()


async def test_who_has_waited_longest_gives_way_first() -> None:
    one = One()
    one.loop.pass_by(0.1)
    second = one.another()
    one.loop.pass_by(0.1)
    third = one.another()
    one.protocol.data_received(GET)
    one.fill()
    one.loop.pass_by(1)
    for gone in (second, third):
        assert not is_refused(one)
        assert cast(Any, gone.transport).ended == "closed"
    assert one.transport.ended is None, "it has asked"
    assert is_refused(one)
    await one.answered()


async def test_between_requests_a_connection_gives_way_without_a_word() -> None:
    one = One()
    one.protocol.data_received(GET)
    one.loop.pass_by(1)
    await one.answered()
    told = one.transport.written
    one.fill()
    assert is_refused(one), "it may be about to ask again"
    one.loop.pass_by(1)
    # Of the answer something is still on its way.
    one.transport.untaken = 1
    assert is_refused(one)
    one.transport.untaken = 0
    assert not is_refused(one)
    assert (one.transport.ended, one.transport.written) == ("closed", told)


async def test_the_next_request_begins_with_its_first_byte() -> None:
    one = One()
    one.protocol.data_received(GET)
    await one.answered()
    one.fill()
    one.loop.pass_by(4)
    one.protocol.data_received(GET[:5])
    assert is_refused(one)
    one.loop.pass_by(0.5)
    assert not is_refused(one)
    assert one.transport.ended == "closed"
