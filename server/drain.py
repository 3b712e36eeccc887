"""Shutting down: new requests are refused, running ones may finish, and every client gets an end.

signal          drain_s later, or         LAST_WORDS_S later:
                at a second signal        who still is there is cut off
  | requests may end | error events go out | the server closes
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http_errors import error_response
from server.protocol.refusals import CountRefusal, Refusal
from server.protocol.wire_errors import SHUTTING_DOWN, shutting_down

# What error events have to reach their readers.
LAST_WORDS_S = 1.0
POLL_S = 0.02
# Who asks how the server is gets its answer until the end.
STAYS_OPEN = frozenset({"/health", "/ready", "/metrics"})


class Requests(Protocol):
    """Ends the requests of the engine."""

    @property
    def alive(self) -> bool:
        """Whether they can still come to their own end."""

    def end_all(self, message: str) -> None:
        """End all of them with an error, and let no more in."""


class Drain:
    """Whether the server shuts down, and the requests that it has begun to answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._hurries = False
        self._answering: set[asyncio.Task[object]] = set()
        self.answered = 0
        """How many requests have ended."""
        self.has_cut = False
        """Whether unfinished requests have been ended."""

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._began_at is not None

    @property
    def answering(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return bool(self._answering)

    def begin(self) -> None:
        """Refuse new requests from now on; a second call stops waiting for running ones, too. Safe
        in a signal's handler."""
        self._hurries = self.draining
        if self._began_at is None:
            self._began_at = self._clock()

    async def finish(self, requests: Requests, drain_s: float) -> None:
        """Wait until all answers are complete or the time is over: then the rest end with an error.
        To be called after ``begin``."""
        while self._answering and requests.alive and not self._is_over(drain_s):
            await asyncio.wait(self._answering, timeout=POLL_S)
        self.has_cut = True
        requests.end_all(SHUTTING_DOWN)
        await self._answered()
        # Who is left reads nothing, or is not with the engine: it still sends, or is encoded.
        for task in self._answering:
            task.cancel()
        await self._answered()

    async def _answered(self) -> None:
        if self._answering:
            await asyncio.wait(self._answering, timeout=LAST_WORDS_S)

    def _is_over(self, drain_s: float) -> bool:
        assert self._began_at is not None
        return self._hurries or self._clock() - self._began_at >= drain_s

    def enter(self, task: "asyncio.Task[object]") -> None:
        """Note that the current task answers a request."""
        self._answering.add(task)

    def leave(self, task: "asyncio.Task[object]") -> None:
        """Note that the current task has answered."""
        self._answering.discard(task)
        self.answered += 1


class DrainGuard:
    """Refuse requests while the server drains, and track all others until they are answered."""

    def __init__(
        self,
        app: ASGIApp,
        drain: Drain,
        retry_after_s: int,
        count_refusal: CountRefusal,
    ) -> None:
        """count_refusal: called with the reason."""
        self._app = app
        self._drain = drain
        self._retry_after_s = retry_after_s
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 with Retry-After while draining; a request that is cut off before its answer
        began gets it, too."""
        if scope["type"] != "http" or scope["path"] in STAYS_OPEN:
            await self._app(scope, receive, send)
            return
        refusal = error_response(scope, shutting_down(self._retry_after_s))
        if self._drain.draining:
            self._count_refusal(Refusal.DRAINING)
            await refusal(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._drain.enter(task)
        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not self._drain.has_cut:
                raise
            if not has_begun:
                await refusal(scope, receive, send)
        finally:
            self._drain.leave(task)
