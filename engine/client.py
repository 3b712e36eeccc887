"""The only crossing between the engine's thread and the event loop.

Requests and aborts go one way through the loop's mailbox; events come back once per step. All
methods here run on the event loop, but for ``_emit``.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from engine.loop import Abort, Emit, EngineLoop, Stop
from engine.token_stream import TokenStream as TokenStream
from engine.types import (
    EngineLimits,
    EngineStats,
    FinishReason,
    PrefixSalt,
    Request,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
)

log = logging.getLogger(__name__)

BuildLoop = Callable[[Emit], EngineLoop]
NO_SALT = PrefixSalt()


class QueueFullError(Exception):
    """No room for so many requests now."""


class PromptTooLongError(Exception):
    """A prompt that can never fit."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"{prompt_tokens} prompt tokens, {max_model_len} at most")
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class EngineDeadError(Exception):
    """The engine has ended; nothing can be generated any more."""


class EngineClient:
    """An async door to an engine that runs on a thread of its own."""

    def __init__(self, build: BuildLoop, *, max_queue: int, max_backlog: int) -> None:
        """build: makes the loop, called on the engine's thread. max_queue: requests that may wait
        beyond those that run. max_backlog: events that a stream keeps for a slow reader."""
        self._build = build
        self._max_queue = max_queue
        self._max_backlog = max_backlog
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._built = threading.Event()
        self._loop: EngineLoop | None = None
        self._failure: BaseException | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, TokenStream] = {}
        self._last_id = 0

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and waits until the engine is built; raises what building raised."""
        self._thread.start()
        self._built.wait()
        if self._failure is not None:
            raise self._failure

    def attach(self) -> None:
        """Delivers events to the running event loop from now on."""
        self._events = asyncio.get_running_loop()

    def stop(self, timeout_s: float) -> bool:
        """Ends the engine after its running step; False when it did not end in time."""
        if self._loop is not None:
            self._loop.mailbox.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and is built."""
        return self._loop is not None and self._failure is None and self._thread.is_alive()

    @property
    def limits(self) -> EngineLimits:
        """What requests are checked against."""
        assert self._loop is not None
        return self._loop.limits

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; never waits for the engine."""
        return self._loop.stats if self._loop is not None else EngineStats()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def capacity(self) -> int:
        """Requests that may run or wait at the same time."""
        return self.limits.max_num_seqs + self._max_queue

    def has_room(self, requests: int) -> bool:
        """Whether so many more requests may be submitted now."""
        return len(self._streams) + requests <= self.capacity

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: PrefixSalt = NO_SALT,
        pooling: bool = False,
        beyond_queue: bool = False,
    ) -> TokenStream:
        """Hands a request to the engine. pooling: for its vector. beyond_queue: even when the queue
        is full.

        Raises PromptTooLongError when it can never fit, QueueFullError when there is no room now,
        EngineDeadError when there is no engine.
        """
        (stream,) = self.submit_choices(
            prompt_ids,
            (params,),
            priority=priority,
            salt=salt,
            pooling=pooling,
            beyond_queue=beyond_queue,
        )
        return stream

    def submit_choices(
        self,
        prompt_ids: tuple[int, ...],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        salt: PrefixSalt = NO_SALT,
        system_tokens: int = 0,
        constraint: TokenConstraint | None = None,
        pooling: bool = False,
        read_with: TokenStream | None = None,
        beyond_queue: bool = False,
    ) -> list[TokenStream]:
        """Hands over one request for each of ``params``, all with the same prompt; or none of them.
        The first is an ordinary request, the others are forks of it. constraint: each gets a copy.
        read_with: a stream that these are read together with. Raises as ``submit`` does."""
        if not self.alive or self._loop is None:
            raise EngineDeadError
        longest = self.limits.max_model_len
        if len(prompt_ids) > longest - any(its_params.max_tokens for its_params in params):
            raise PromptTooLongError(len(prompt_ids), longest)
        if not self.has_room(len(params)) and not beyond_queue:
            raise QueueFullError
        wake = asyncio.Event() if read_with is None else read_with.wake
        streams: list[TokenStream] = []
        for number, its_params in enumerate(params, start=self._last_id + 1):
            fork_of = streams[0].request.request_id if streams else None
            request = Request(
                number,
                prompt_ids,
                its_params,
                priority,
                salt,
                system_tokens,
                fork_of,
                constraint.copy() if constraint is not None else None,
                pooling,
            )
            streams.append(TokenStream(request, self._abort, self._max_backlog, wake))
            self._streams[number] = streams[-1]
            self._loop.mailbox.put(request)
        self._last_id += len(params)
        return streams

    def _abort(self, request_id: int) -> None:
        assert self._loop is not None
        self._loop.mailbox.put(Abort(request_id))

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.deliver(event)
            if event.finish is not None:
                del self._streams[event.request_id]

    def _fail_all(self) -> None:
        for request_id in list(self._streams):
            self._deliver(
                [TokenEvent(request_id, None, FinishReason.ERROR, message="the engine has ended")]
            )

    # --- the engine's thread --------------------------------------------------------------------

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
            log.exception("the engine has failed")
            self._failure = error
        self._call_soon(self._fail_all)
        self._loop.close()

    def _emit(self, events: list[TokenEvent]) -> None:
        self._call_soon(self._deliver, events)

    def _call_soon(self, call: Callable[..., None], *args: object) -> None:
        if self._events is None:
            return
        try:
            self._events.call_soon_threadsafe(call, *args)
        except RuntimeError:
            log.debug("the event loop has closed: events dropped")
