"""Limits the prompt tokens of a step, so that steps take about their target time.

A prompt token behind a long context takes longer than one at the start, because it attends to more
tokens. So limits count tokens without context, and a token behind ``n`` others counts as
``1 + pair_cost * n`` of them. ``pair_cost`` is learnt from the times of full steps."""

import math
from dataclasses import dataclass, field

# A budget grows by at most this factor per step, because step times are noisy.
MAX_GROWTH = 1.5
# The budget stays unchanged for step times between this fraction of the target and the target.
CALM_FRACTION = 0.8
# A step that only computes prompts delays no answer, so it may take this many times the target. If
# even a step of few tokens takes long, as these choose many experts, it may take FIXED_SHARES times
# the part that does not depend on their number, up to LONGEST_ALONE_S: newcomers wait for its end.
ALONE_TARGETS = 5.0
FIXED_SHARES = 5.0
LONGEST_ALONE_S = 2.0
# That part is measured by steps whose numbers of tokens deviate this much, by the mean number.
LEAST_DEVIATION = 0.25
# If a step computes prompts while sequences generate, it may take this many times as long as a
# step without prompts. So prompts progress even if generating takes most of the target time.
MAX_SLOWDOWN = 3.0
# The weight of the newest step in the moving average of the times of steps without prompts.
NEWEST_WEIGHT = 0.2
# The cost of a pair is measured by two kinds of steps: with a mean context below SHORT_CONTEXT, and
# with one of LONG_CONTEXT or more.
SHORT_CONTEXT, LONG_CONTEXT = 2048, 8192
# From this weight of a token on, attention takes most of a step's time, and its rows have no tiles.
ATTENTION_WEIGHT = 2.0
# The weight of the newest step in both of these measurements.
LEARNT_WEIGHT = 0.5
# The number of token rows that MLX's kernels compute together on a GPU. Fewer rows take the same
# time (mlx/backend/metal/quantized.cpp).
GPU_TILE_ROWS = 32


def alone_target_s(target_s: float, fixed_s: float) -> float:
    """Return the target time of steps that only compute prompts, of which ``fixed_s`` does not
    depend on the number of tokens."""
    return max(ALONE_TARGETS * target_s, min(FIXED_SHARES * fixed_s, LONGEST_ALONE_S))


@dataclass(slots=True)
class FixedTime:
    """The part of steps' times that does not depend on the number of tokens, by a line through the
    newest steps (least squares, with weights that decay)."""

    seconds: float | None = None
    """None until it is measured."""
    _tokens: float = 0.0
    _mean_s: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        weight = NEWEST_WEIGHT if self._tokens else 1.0
        more, more_s = tokens - self._tokens, seconds - self._mean_s
        self._tokens += weight * more
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more * more_s)
        if self._variance > (LEAST_DEVIATION * self._tokens) ** 2:
            slope = self._covariance / self._variance
            self.seconds = min(max(0.0, self._mean_s - slope * self._tokens), self._mean_s)


@dataclass(slots=True)
class TokenBudget:
    """The limit of prompt tokens per step. It is adjusted to the measured times of steps."""

    target_s: float
    minimum: int
    maximum: int
    tokens: int
    """The limit of prompt tokens in a step in which sequences also generate tokens."""
    tile: int = 1
    """The number of token rows (a tile) that the device computes together."""
    pair_cost: float = 0.0
    """The time of attending to one earlier token, divided by a token's time without context."""
    alone: int = field(init=False)
    """The limit of prompt tokens in a step that only computes prompts."""
    decoding_s: float = field(default=0.0, init=False)
    """The mean time of steps without prompt tokens; 0 before the first one."""
    token_s: float = field(default=0.0, init=False)
    """The mean time of a prompt token in short contexts; 0 before it is measured."""
    context: float = field(default=0.0, init=False)
    """The mean number of tokens to which ``token_s`` attends."""
    fixed: FixedTime = field(default_factory=FixedTime, init=False)
    """Of steps that only compute prompts."""

    def __post_init__(self) -> None:
        assert 1 <= self.minimum <= self.tokens <= self.maximum
        assert self.target_s > 0
        assert self.tile >= 1
        if self.maximum >= self.tile:
            self.maximum -= self.maximum % self.tile
        self.minimum = min(self.maximum, math.ceil(self.minimum / self.tile) * self.tile)
        self.tokens = self.alone = self._bounded(self.tokens)

    def room(self, *, decoding: bool) -> int:
        """Return the limit of a step's prompt tokens, counted as tokens without context."""
        return self.tokens if decoding else self.alone

    def weight(self, start: int, count: float) -> float:
        """Return as how many tokens each of ``count`` tokens behind ``start`` others counts."""
        return 1 + self.pair_cost * (start + (count - 1) / 2)

    def seconds(self, start: int, end: int) -> float:
        """Return the time of computing tokens [start, end) of a prompt; 0 before it is measured."""
        return self.token_s * (end - start) * self.weight(start, end - start)

    def chunk(self, room: float, start: int, rows: int = 0, *, first: bool = True) -> int:
        """Return the number of prompt tokens behind ``start`` others to add to a step that has
        ``rows`` tokens already. ``room`` is the limit that is left. Unless attention takes most of
        the time, the number is moved up or down to the nearest number that makes the last tile
        full. The step's ``first`` chunk has more than one token, as entries of one token count as
        generated ones."""
        least = self.weight(start, 0)
        # The solution of count * weight(start, count) = room.
        count = 2 * room / (least + math.sqrt(least**2 + 2 * self.pair_cost * room))
        fit = int(count)
        if self.weight(start, count) > ATTENTION_WEIGHT:
            return max(fit, 2 if first else 0)
        begun = (rows + fit) % self.tile
        fit += -begun if 2 * begun <= self.tile else self.tile - begun
        return max(fit, self.tile - rows % self.tile if first else 0)

    def observe(
        self, prefill_tokens: int, seconds: float, *, decoding: bool = True, pairs: int = 0
    ) -> None:
        """Adjust the limits to a step's time. With ``decoding``, the step also generated tokens.
        ``pairs`` counts each prompt token with each token before it."""
        if seconds <= 0:
            return
        if prefill_tokens == 0:
            weight = NEWEST_WEIGHT if self.decoding_s else 1.0
            self.decoding_s += weight * (seconds - self.decoding_s)
            return
        limit, context = self.room(decoding=decoding), pairs / prefill_tokens
        weight = 1 + self.pair_cost * context
        tile = self.tile if weight <= ATTENTION_WEIGHT else 1
        # The next tokens attend to at most twice the context.
        full = prefill_tokens * weight + tile * (2 * weight - 1) > limit
        if full and prefill_tokens >= self.tile:
            others_s = min(self.decoding_s, seconds / 2) if decoding else 0.0
            self._learn(context, (seconds - others_s) / prefill_tokens)
        cost = prefill_tokens + self.pair_cost * pairs  # by what was just learnt
        if decoding:
            ratio = max(self.target_s, MAX_SLOWDOWN * self.decoding_s) / seconds
            self.tokens = self._steered(limit, cost, ratio, full=full)
        else:
            if context < SHORT_CONTEXT:
                self.fixed.observe(cost, seconds)
            # Until steps of several sizes have shown it, half of the smallest step's time is fixed.
            fixed_s = seconds / 2 if limit == self.minimum else 0.0
            if self.fixed.seconds is not None:
                fixed_s = min(self.fixed.seconds, seconds * (1 - 1 / FIXED_SHARES))
            own_s = alone_target_s(self.target_s, fixed_s) - fixed_s
            ratio = own_s / (seconds - fixed_s)
            self.alone = self._steered(limit, cost, ratio, full=full)

    def _learn(self, context: float, token_s: float) -> None:
        """Adjust the measured costs to a step whose prompt tokens took ``token_s`` each, behind
        ``context`` others on average."""
        if context < SHORT_CONTEXT:
            weight = LEARNT_WEIGHT if self.token_s else 1.0
            self.token_s += weight * (token_s - self.token_s)
            self.context += weight * (context - self.context)
        elif context >= LONG_CONTEXT and self.token_s:
            # Both times are of the form a * (1 + pair_cost * context).
            ratio = max(1.0, token_s / self.token_s)
            pair_cost = (ratio - 1) / max(context - ratio * self.context, context / 2)
            self.pair_cost += LEARNT_WEIGHT * (pair_cost - self.pair_cost)

    def _steered(self, limit: int, cost: float, ratio: float, *, full: bool) -> int:
        """Return the new limit. ``cost`` is that of the step's prompt tokens, ``ratio`` the step's
        target time divided by its real time."""
        budget: float = limit
        if ratio < 1:
            # Only prompt tokens can be cut, so they must make up for the whole excess.
            budget = max(cost, self.minimum) * ratio
        elif full and ratio > 1 / CALM_FRACTION:
            longest = max(limit * MAX_GROWTH, limit + self.tile)
            budget = min(limit * ratio * CALM_FRACTION, longest)
        return self._bounded(budget)

    def _bounded(self, tokens: float) -> int:
        return min(self.maximum, max(self.minimum, int(tokens) // self.tile * self.tile))
