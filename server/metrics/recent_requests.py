"""The requests that ended last, in figures: times and counts, never what they were about."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from server.metrics.answer_times import RequestTimes

KEPT_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that has ended."""

    number: int
    """Counts up from 1."""
    ended_at: float
    """Seconds, by the clock of RecentRequests."""
    answers: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    first_token_s: float | None
    """From its arrival; None where there was no token."""
    duration_s: float
    tokens_per_s: float | None
    """From the first token to the end; None for fewer than two tokens."""
    tenant: bytes = field(repr=False)
    finish: str
    """How its answers ended, each way once, with commas: stop, length, tool_calls; error after a
    fault; aborted where nobody waited for the end."""


class RecentRequests:
    """The last requests of one server, a limited number of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: that of the requests' times."""
        self.clock = clock
        self._numbers = count(1)
        self._ended: deque[RecentRequest] = deque(maxlen=KEPT_REQUESTS)

    def add(self, times: RequestTimes) -> None:
        """Keep a request that has ended; the oldest one makes room. Those that the engine never had
        are not kept."""
        if not times.answers:
            return
        now = self.clock()
        duration_s = now - times.arrived
        self._ended.append(
            RecentRequest(
                number=next(self._numbers),
                ended_at=now,
                answers=len(times.answers),
                prompt_tokens=times.prompt_tokens,
                cached_tokens=times.cached_tokens,
                generated_tokens=times.generated_tokens,
                first_token_s=times.first_token_s,
                duration_s=duration_s,
                tokens_per_s=times.tokens_per_s(duration_s),
                tenant=times.tenant,
                finish=times.finish or "",
            )
        )

    def newest_first(self, tenant: bytes | None = None) -> list[RecentRequest]:
        """Return the kept requests of a tenant; of None, all."""
        return [request for request in reversed(self._ended) if tenant in (None, request.tenant)]
