"""Shut down: refuse new requests, let running ones finish, and give every client an end.

signal          drain_s later, or         LAST_WORDS_S later:
                at a second signal        remaining clients are cut off
  | requests may end | error events go out | the server closes
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from server.protocol.wire_errors import SHUTTING_DOWN

# Time for error events to reach the clients.
LAST_WORDS_S = 1.0
POLL_S = 0.02


class Requests(Protocol):
    """The requests of the engine."""

    @property
    def alive(self) -> bool:
        """Whether requests can still finish."""

    def end_all(self, message: str) -> None:
        """End all requests with an error, and admit no more."""


class Drain:
    """The state of a shutdown, and the requests that are being answered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._hurries = False
        self._answering: set[asyncio.Task[object]] = set()
        self.answered = 0
        self.has_cut = False
        """Whether unfinished requests were ended."""

    @property
    def draining(self) -> bool:
        return self._began_at is not None

    @property
    def answering(self) -> int:
        return len(self._answering)

    def begin(self) -> None:
        """Refuse new requests. A second call ends running requests. Safe in a signal handler."""
        self._hurries = self.draining
        if self._began_at is None:
            self._began_at = self._clock()

    async def finish(self, requests: Requests, drain_s: float) -> None:
        """Wait for answers up to ``drain_s``, then end the rest with an error. Call ``begin``
        first."""
        while self._answering and requests.alive and not self._is_over(drain_s):
            await asyncio.wait(self._answering, timeout=POLL_S)
        self.has_cut = True
        requests.end_all(SHUTTING_DOWN)
        await self._answered()
        # These requests do not read their events, or have not reached the engine.
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
