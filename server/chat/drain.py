"""Shut down: refuse new requests, let running requests finish, and end the rest with an error.

1. At a signal: new requests are refused, and running requests may finish.
2. After ``drain_s``, or at a second signal: the remaining requests end with error events.
3. After LAST_WORDS_S: clients that still read are cut off, and the server closes.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from server.protocol.wire_errors import SHUTTING_DOWN

# Time for the error events of ended requests to reach their clients.
LAST_WORDS_S = 1.0
POLL_S = 0.02


class Requests(Protocol):
    """The part of the engine that a shutdown uses."""

    @property
    def alive(self) -> bool:
        """True while the engine runs, so that requests can finish."""

    def end_all(self, message: str) -> None:
        """End all requests with an error that has this message, and admit no more requests."""


class Drain:
    """The state of a shutdown, and the asyncio tasks that still answer requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._hurries = False
        self._answering: set[asyncio.Task[object]] = set()
        self.wake: Callable[[], object] = lambda: None
        """Called by ``begin``, possibly in another thread or in a signal handler."""
        self.answered = 0
        self.has_cut = False
        """True after ``finish`` has ended all unfinished requests."""

    @property
    def draining(self) -> bool:
        return self._began_at is not None

    @property
    def answering(self) -> int:
        return len(self._answering)

    def begin(self) -> None:
        """Refuse new requests. A second call ends running requests. Safe in signal handlers."""
        self._hurries = self.draining
        if self._began_at is None:
            self._began_at = self._clock()
        self.wake()

    async def finish(self, requests: Requests, drain_s: float) -> None:
        """Wait up to ``drain_s`` for the running answers, then end unfinished requests with an
        error. Call ``begin`` first."""
        while self._answering and requests.alive and not self._is_over(drain_s):
            await asyncio.wait(self._answering, timeout=POLL_S)
        self.has_cut = True
        requests.end_all(SHUTTING_DOWN)
        await self._answered()
        # Some tasks do not notice the end: they read no events, or have no request in the engine.
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
        self._answering.add(task)

    def leave(self, task: "asyncio.Task[object]") -> None:
        self._answering.discard(task)
        self.answered += 1
