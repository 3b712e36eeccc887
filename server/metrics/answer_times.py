"""Measures the times of answers on the event loop, as clients see them.

An answer is one choice for one prompt, or one vector. A request may have several answers."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.types import Histogram
from server.text.pieces import Delta

Clock = Callable[[], float]

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS_S = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION_BOUNDS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINISH_REASONS = ("stop", "length", "tool_calls", "error", "aborted")


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, ... up to the first that is at least ``max_tokens``."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    bounds = [next(series)]
    while bounds[-1] < max_tokens:
        bounds.append(next(series))
    return tuple(bounds)


class Latencies:
    """Histograms of latencies and lengths, for all answers of a server."""

    def __init__(self, max_model_len: int) -> None:
        """``max_model_len`` is the maximum sequence length in tokens."""
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.duration_s = Histogram(DURATION_BOUNDS_S)
        self.prompt_tokens = Histogram(token_bounds(max_model_len))
        self.generated_tokens = Histogram(token_bounds(max_model_len))
        self.finished: Counter[str] = Counter()
        """``{finish reason, one of FINISH_REASONS: number of ended answers}``."""


class RequestTimes:
    """The times of one request and of its answers."""

    def __init__(self, latencies: Latencies, clock: Clock = time.monotonic) -> None:
        self.latencies = latencies
        self.clock = clock
        self.arrived = clock()
        self.id = ""
        """The request's X-Request-Id."""
        self.answers: list[AnswerTimes] = []
        self.prompt_tokens = 0
        """Number of tokens in all prompts of the request."""
        self.tenant = b""
        """Identifies the owner of the API key, like ``tenant`` in PrefixSalt (engine/types.py)."""

    def answers_to(self, prompt_tokens: int, count: int, tenant: bytes) -> "list[AnswerTimes]":
        """Start to measure ``count`` answers to one prompt. Its cached tokens are counted once."""
        new = [AnswerTimes(self, prompt_tokens, first=number == 0) for number in range(count)]
        self.answers += new
        self.prompt_tokens += prompt_tokens
        self.tenant = tenant
        return new

    def observe(self, delta: Delta) -> None:
        """Record a new part of the answer ``delta.index``."""
        answer = self.answers[delta.index]
        if delta.prefix is not None:
            answer.cached_tokens = delta.prefix.cached_tokens
        answer.delivered(len(delta.token_ids), delta.finish)

    def end(self, finish: str) -> None:
        """Record the end of all answers that have not ended."""
        for answer in self.answers:
            answer.end(finish)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token of any answer, or None before that token."""
        return min((a.first_token_s for a in self.answers if a.first_token_s), default=None)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.arrived

    @property
    def generating_s(self) -> float:
        """The longest time in seconds from an answer's first token to its newest token."""
        return max((answer.generating_s for answer in self.answers), default=0.0)

    @property
    def generated_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    def figures(self, ended_s: float) -> dict[str, Any]:
        """Return the figures for logs and lists of a request that took ``ended_s`` seconds. The
        speed is that from the first token on, or None before two tokens."""
        tokens, first_s = self.generated_tokens, self.first_token_s
        elapsed_s = 0.0 if first_s is None else ended_s - first_s
        return {
            "first_token_s": first_s,
            "tokens_per_s": (tokens - 1) / elapsed_s if tokens > 1 and elapsed_s > 0 else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": tokens,
            "finish": self.finish,
        }

    @property
    def cached_tokens(self) -> int:
        return sum(answer.cached_tokens for answer in self.answers if answer.first)

    @property
    def finish(self) -> str | None:
        """The answers' finish reasons, joined by commas, or None if no answer has ended."""
        return ",".join(sorted({a.finish for a in self.answers if a.finish is not None})) or None


@dataclass(slots=True, eq=False)
class AnswerTimes:
    """The times of one answer during its generation."""

    request: RequestTimes
    prompt_tokens: int
    first: bool
    """True for the first answer to a prompt."""
    tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that were found in the cache."""
    first_token_s: float | None = None
    finish: str | None = None
    _newest: float = field(init=False)

    def __post_init__(self) -> None:
        self._newest = self.request.arrived

    @property
    def generating_s(self) -> float:
        """Seconds from the first token to the newest token, or 0 before the first token."""
        if self.first_token_s is None:
            return 0.0
        return self._newest - self.request.arrived - self.first_token_s

    def delivered(self, tokens: int, finish: str | None) -> None:
        """Record ``tokens`` new tokens, and the answer's end if ``finish`` is set."""
        now = self.request.clock()
        if tokens:
            waited = now - self._newest
            if self.tokens:
                self.request.latencies.inter_token_s.observe(waited)
            else:
                self.first_token_s = waited
                self.request.latencies.first_token_s.observe(waited)
            self.tokens += tokens
            self._newest = now
        if finish is not None:
            self.end(finish)

    def end(self, finish: str) -> None:
        """Record the end of the answer. Later calls have no effect."""
        assert finish in FINISH_REASONS
        if self.finish is not None:
            return
        self.finish = finish
        latencies = self.request.latencies
        latencies.finished[finish] += 1
        latencies.duration_s.observe(self.request.clock() - self.request.arrived)
        latencies.prompt_tokens.observe(self.prompt_tokens)
        latencies.generated_tokens.observe(self.tokens)


KEPT_REQUESTS = 64


class RecentRequests:
    """The times and token counts of a server's last KEPT_REQUESTS requests, but no contents."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """``clock`` must be the same clock as in each RequestTimes that ``add`` gets."""
        self.clock = clock
        self._numbers = itertools.count(1)
        self._ended: deque[tuple[bytes, float, dict[str, Any]]] = deque(maxlen=KEPT_REQUESTS)

    def add(self, times: RequestTimes) -> None:
        """Store an ended request's figures if it reached the engine. Drop the oldest request."""
        if not times.answers:
            return
        now = self.clock()
        duration_s = now - times.arrived
        figures = {
            "number": next(self._numbers),
            "id": times.id,
            "answers": len(times.answers),
            "duration_s": duration_s,
            **times.figures(duration_s),
            "finish": times.finish or "",
        }
        self._ended.append((times.tenant, now, figures))

    def newest_first(self, tenant: bytes | None = None) -> list[dict[str, Any]]:
        """Return the figures of a tenant's requests, or of all requests if the tenant is None."""
        now = self.clock()
        return [
            figures | {"ended_s_ago": now - ended}
            for owner, ended, figures in reversed(self._ended)
            if tenant in (None, owner)
        ]
