"""Passes requests from the asyncio event loop to the engine's thread, and token events back.

A request enters the mailbox of EngineLoop. All events of a step come back in one call. Call public
methods on the event loop's thread, unless a docstring says that any thread may call the method.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from engine.memory_map import MemoryMap
from engine.messages import Abort, CheckModel, GetMemoryMap, SetKVLimit, SetMemoryPressure, Stop
from engine.power import SleepDetector
from engine.step.loop import Emit, EngineLoop
from engine.types import (
    EngineDeadError,
    EngineLimits,
    EngineStats,
    EngineStuckError,
    FinishReason,
    QueueFullError,
    Request,
    ShareFullError,
    TokenEvent,
)
from kvcache.backends.backend import BackendFailedError
from kvcache.backends.faults import GPUFailure


@dataclass(slots=True)
class Slots:
    """Counts each tenant's requests in the engine. A running or waiting request takes one slot."""

    max_share_ratio: float
    """The fraction of all slots that one tenant may take."""
    capacity: Callable[[], int]
    _taken: Counter[bytes] = field(default_factory=Counter)

    @property
    def max_share(self) -> int:
        """The number of slots that one tenant may take."""
        return max(1, int(self.capacity() * self.max_share_ratio))

    def check(self, requests: int, tenant: bytes) -> None:
        """Raise QueueFullError if more slots would be taken than there are, or ShareFullError if
        the tenant would take more than its share."""
        if self._taken.total() + requests > self.capacity():
            raise QueueFullError
        if self._taken[tenant] + requests > self.max_share:
            raise ShareFullError

    def take(self, requests: int, tenant: bytes) -> None:
        """Count ``requests`` more slots as taken, without a check of limits."""
        self._taken[tenant] += requests

    def free(self, tenant: bytes) -> None:
        self._taken[tenant] -= 1
        assert self._taken[tenant] >= 0, "a slot was freed twice"
        if not self._taken[tenant]:
            del self._taken[tenant]


# The most unread events that a stream keeps; one more ends the stream's request with an error.
MAX_BACKLOG = 8192


@dataclass(slots=True, eq=False)
class TokenStream:
    """The events of one answer, in order. Closing an unfinished stream aborts the answer."""

    request: Request
    answer_id: int
    _abort: Callable[[int], None]
    _max_backlog: int
    wake: asyncio.Event
    """Set by each event. Streams that are read together share one."""
    first_s: float = 0.0
    """When the engine made the first token (``time.monotonic``); 0 until then."""
    newest_s: float = 0.0
    _events: deque[TokenEvent] = field(default_factory=deque)
    _ended: bool = False

    async def next_batch(self, timeout_s: float) -> list[TokenEvent]:
        """Wait for an event; return all events since the last call. Return an empty list after a
        timeout, or if the answer's last event was returned before."""
        (batch,) = await self.next_batches((self,), timeout_s)
        return batch

    @staticmethod
    async def next_batches(
        streams: Sequence["TokenStream"], timeout_s: float
    ) -> list[list[TokenEvent]]:
        """Wait for an event of any stream; return each stream's new events. All streams must share
        one ``wake``."""
        if _silent(streams):
            wake = streams[0].wake
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while _silent(streams):
                        # An event of another stream, or one already read, may have set ``wake``.
                        wake.clear()
                        await wake.wait()
        return [stream._take() for stream in streams]

    def close(self) -> None:
        """Abort the answer unless it has ended. Further calls do nothing."""
        if not self._ended:
            self._ended = True
            self._abort(self.answer_id)

    def deliver(self, event: TokenEvent, made_s: float | None = None) -> None:
        """Add an event, or end the request with an error if the stream has too many events.
        ``made_s`` is the time at which the engine made the event; None means now."""
        if self._ended:
            return
        if event.token_id is not None:
            self.newest_s = time.monotonic() if made_s is None else made_s
            self.first_s = self.first_s or self.newest_s
        if len(self._events) >= self._max_backlog:
            self.close()
            event = TokenEvent(
                event.request_id, None, FinishReason.ERROR, message="the reader is too slow"
            )
        self._events.append(event)
        self._ended = self._ended or event.finish is not None
        self.wake.set()

    def _take(self) -> list[TokenEvent]:
        batch = list(self._events)
        self._events.clear()
        return batch


def _silent(streams: Sequence[TokenStream]) -> bool:
    """Return True if all events are read, and at least one of the streams has not ended."""
    return not any(s._events for s in streams) and not all(s._ended for s in streams)


log = logging.getLogger(__name__)

BuildLoop = Callable[[Emit], EngineLoop]
ENGINE_ENDED = "the engine has ended"


class EngineClient:
    """Runs an engine on its own thread, and passes requests to this thread and events back."""

    def __init__(
        self,
        build: BuildLoop,
        *,
        max_queue: int,
        max_backlog: int = MAX_BACKLOG,
        max_share_ratio: float = 1.0,
    ) -> None:
        """The engine's thread calls ``build`` to make the loop. At most ``max_queue`` requests may
        wait. A stream keeps at most ``max_backlog`` unread events. One tenant may take the fraction
        ``max_share_ratio`` of all slots for requests."""
        self._build = build
        self._max_queue = max_queue
        self._max_backlog = max_backlog
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._built = threading.Event()
        self._loop: EngineLoop | None = None
        self._failure: BaseException | None = None
        self._hung_behind: BackendFailedError | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, TokenStream] = {}
        self.slots = Slots(max_share_ratio, lambda: self.capacity)
        self._sleep = SleepDetector()
        self._last_id = 0
        self._closed = False
        self.pressure = 0
        """The newest PressureLevel (engine/machine.py) of the system's memory."""
        self._requested_maps: set[asyncio.Future[MemoryMap]] = set()

    # --- start and end of the engine ------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread, and wait until the engine is built. Raises build errors."""
        self._thread.start()
        self._built.wait()
        if self._failure is not None:
            raise self._failure

    def attach(self) -> None:
        """Make the running asyncio event loop the one that receives the engine's events."""
        self._events = asyncio.get_running_loop()

    def stop(self, timeout_s: float) -> bool:
        """End the engine after its running step; return whether it ended within ``timeout_s``.
        Return at once for an engine that was declared dead."""
        if self._loop is not None:
            self._loop.mailbox.put(Stop())
        self._thread.join(0.0 if isinstance(self._failure, EngineStuckError) else timeout_s)
        return not self._thread.is_alive()

    def declare_dead(self) -> None:
        """End all streams with an error, because a step hangs. Any thread may call this."""
        assert self._loop is not None
        self._hung_behind = self._loop.record_hang()
        self._failure = EngineStuckError()
        self._call_soon(self._fail_all, self.failure)

    def end_all(self, message: str) -> None:
        """End all requests with the error ``message``, and admit no more requests."""
        self._closed = True
        for request_id in list(self._streams):
            self._abort(request_id)
        self._fail_all(message)

    def set_memory_pressure(self, level: int) -> None:
        """Report the system's PressureLevel to the engine. Any thread may call this."""
        assert self._loop is not None
        self.pressure = level
        self._loop.mailbox.put(SetMemoryPressure(level))

    def set_kv_limit(self, limit_bytes: int, answer: Callable[[int], None]) -> None:
        """Limit the memory for K and V to ``limit_bytes``, or to the bytes in use if they are more.
        The engine's thread calls ``answer`` with the new limit, unless the engine ends first. Any
        thread may call this."""
        assert self._loop is not None
        self._loop.mailbox.put(SetKVLimit(limit_bytes, answer))

    def notice_sleep(self) -> None:
        """If the machine has slept, make the engine test the model before the next request. If the
        test fails, the engine ends. Any thread may call this."""
        if slept_s := self._sleep.slept_s():
            assert self._loop is not None
            log.info("the machine slept for %.0f s: the model is checked first", slept_s)
            self._loop.mailbox.put(CheckModel())

    @property
    def alive(self) -> bool:
        return self._loop is not None and self._failure is None and self._thread.is_alive()

    @property
    def kv_backend_failed(self) -> bool:
        """Return True if a fault of the memory for K and V ended the engine or its start."""
        error = self._hung_behind or self._failure
        named = GPUFailure.of(str(error))
        return isinstance(error, BackendFailedError) and named in (None, GPUFailure.KV_MEMORY)

    @property
    def failure(self) -> str:
        """The reason for clients that the engine has ended, and what to do if that is known."""
        named = GPUFailure.of(str(self._hung_behind or self._failure))
        return ENGINE_ENDED if named is None else f"{ENGINE_ENDED}: {named.advice}"

    @property
    def limits(self) -> EngineLimits:
        assert self._loop is not None
        return self._loop.limits

    @property
    def stats(self) -> EngineStats:
        return self._loop.stats if self._loop is not None else EngineStats()

    @property
    def busy_since(self) -> float | None:
        """Return the time (``time.monotonic``) when the current work began, or when a step last
        completed if that was later. Return None if there is no work, or the engine has failed."""
        if self._loop is None or self._failure is not None:
            return None
        return self._loop.busy_since

    @property
    def step_age_s(self) -> float:
        since = self.busy_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    @property
    def capacity(self) -> int:
        """The largest number of requests that may run or wait at the same time."""
        return self.limits.max_num_seqs + self._max_queue

    async def memory_map(self) -> MemoryMap:
        """Return a snapshot of the cache's memory, made between two steps. Raises EngineDeadError
        if the engine has ended, or ends before the snapshot is made."""
        if not self.alive or self._loop is None:
            raise EngineDeadError
        future: asyncio.Future[MemoryMap] = asyncio.get_running_loop().create_future()
        self._requested_maps.add(future)
        self._loop.mailbox.put(GetMemoryMap(partial(self._call_soon, _answer, future)))
        try:
            return await future
        finally:
            self._requested_maps.remove(future)

    # --- submitting requests and delivering events ----------------------------------------------

    def submit(self, request: Request, read_with: TokenStream | None = None) -> list[TokenStream]:
        """Submit a request; return a stream for each answer. The new streams share the ``wake`` of
        the stream ``read_with``, so that one call can wait for all of them. Raises
        PromptTooLongError, QueueFullError or EngineDeadError."""
        if self._closed or not self.alive or self._loop is None:
            raise EngineDeadError
        self.limits.check_length(request)
        if not request.beyond_queue:
            self.slots.check(len(request.params), request.salt.tenant)
        self.notice_sleep()
        wake = asyncio.Event() if read_with is None else read_with.wake
        request = replace(request, request_id=self._last_id + 1, submitted_s=time.monotonic())
        streams = {
            answer_id: TokenStream(request, answer_id, self._abort, self._max_backlog, wake)
            for answer_id in request.answer_ids
        }
        self._last_id += len(streams)
        self._streams |= streams
        self.slots.take(len(streams), request.salt.tenant)
        self._loop.mailbox.put(request)
        return list(streams.values())

    def _abort(self, request_id: int) -> None:
        assert self._loop is not None
        self._loop.mailbox.put(Abort(request_id))

    def _deliver(self, events: list[TokenEvent], made_s: float | None = None) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.deliver(event, made_s)
            if event.finish is FinishReason.ERROR and not self._closed:
                log.warning("the request %s has failed: %s", stream.request.name, event.message)
            if event.finish is not None:
                del self._streams[event.request_id]
                self.slots.free(stream.request.salt.tenant)

    def _fail_all(self, message: str) -> None:
        for future in self._requested_maps:
            if not future.done():
                future.set_exception(EngineDeadError())
        for request_id in list(self._streams):
            self._deliver([TokenEvent(request_id, None, FinishReason.ERROR, message=message)])

    # --- on the engine's thread: the loop and its events ----------------------------------------

    def _main(self) -> None:
        try:
            self._loop = self._build(self._emit)
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._built.set()
        try:
            self._loop.run()
        except BaseException as error:
            log.exception("the engine has failed; %s", self._loop.last_stats())
            self._failure = error
        self._call_soon(self._fail_all, self.failure)
        self._loop.close()

    def _emit(self, events: list[TokenEvent]) -> None:
        self._call_soon(self._deliver, events, time.monotonic())

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        if self._events is None:
            return
        try:
            self._events.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop has closed: events dropped")


def _answer(future: "asyncio.Future[MemoryMap]", answer: MemoryMap) -> None:
    if not future.done():
        future.set_result(answer)
