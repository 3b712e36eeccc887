"""Shutting down: new requests are refused, running ones may finish, and every client gets an end.

signal          drain_s later, or         LAST_WORDS_S later:
                at a second signal        who still is there is cut off
  | requests may end | error events go out | the server closes
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from server.protocol.wire_errors import SHUTTING_DOWN

# What error events have to reach their readers.
LAST_WORDS_S = 1.0
POLL_S = 0.02


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
    def answering(self) -> int:
        """How many requests are not answered yet."""
        return len(self._answering)

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
