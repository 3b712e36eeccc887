"""The events of a request, for a reader on another thread than the engine's."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.types import FinishReason, Request, TokenEvent


class TokenStream:
    """The events of one request, in order. Closing it before the end aborts the request."""

    def __init__(
        self,
        request: Request,
        abort: Callable[[int], None],
        max_backlog: int,
        wake: asyncio.Event,
    ) -> None:
        """wake: set when there is something to read; streams that are read together share it."""
        self.request = request
        self._abort = abort
        self._max_backlog = max_backlog
        self._events: deque[TokenEvent] = deque()
        self.wake = wake
        self._ended = False

    async def next_batch(self, timeout_s: float) -> list[TokenEvent]:
        """Return all events since the last call; wait for the first one. Empty when the time
        passed first, and for ever after the last event."""
        (batch,) = await self.next_batches((self,), timeout_s)
        return batch

    @staticmethod
    async def next_batches(
        streams: Sequence["TokenStream"], timeout_s: float
    ) -> list[list[TokenEvent]]:
        """Do what ``next_batch`` does for streams that are read together: wait for the first event
        of any of them, and return those of all."""
        if _silent(streams):
            wake = streams[0].wake
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while _silent(streams):
                        # Set for events that were taken, or for a stream that is not read here.
                        wake.clear()
                        await wake.wait()
        return [stream._take() for stream in streams]

    def close(self) -> None:
        """Abort the request unless it has ended: nobody reads any more. Idempotent."""
        if not self._ended:
            self._ended = True
            self._abort(self.request.request_id)

    def deliver(self, event: TokenEvent) -> None:
        """Take an event; a reader that never comes ends its own request."""
        if self._ended:
            return
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
    """Return whether there is nothing to read, but may be later."""
    return not any(s._events for s in streams) and not all(s._ended for s in streams)
