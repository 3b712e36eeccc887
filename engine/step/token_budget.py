"""Limits the prompt tokens of a step, so that steps take about their target time."""

import math
from dataclasses import dataclass, field

# A budget grows by at most this factor per step, because step times are noisy.
MAX_GROWTH = 1.5
# The budget stays unchanged for step times between this fraction of the target and the target.
CALM_FRACTION = 0.8
# A step that only computes prompts delays no answer, so it may take this many times the target.
ALONE_TARGETS = 5.0
# If a step computes prompts while sequences generate, it may take this many times as long as a
# step without prompts. So prompts progress even if generating takes most of the target time.
MAX_SLOWDOWN = 3.0
# The weight of the newest step in the moving average of the times of steps without prompts.
NEWEST_WEIGHT = 0.2
# The number of token rows that MLX's kernels compute together on a GPU. Fewer rows take the same
# time (mlx/backend/metal/quantized.cpp).
GPU_TILE_ROWS = 32


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
    alone: int = field(init=False)
    """The limit of prompt tokens in a step that only computes prompts."""
    decoding_s: float = field(default=0.0, init=False)
    """The mean time of steps without prompt tokens; 0 before the first one."""

    def __post_init__(self) -> None:
        assert 1 <= self.minimum <= self.tokens <= self.maximum
        assert self.target_s > 0
        assert self.tile >= 1
        if self.maximum >= self.tile:
            self.maximum -= self.maximum % self.tile
        self.minimum = min(self.maximum, math.ceil(self.minimum / self.tile) * self.tile)
        self.tokens = self.alone = self._bounded(self.tokens)

    def room(self, *, decoding: bool, rows: int = 0) -> int:
        """Return the number of prompt tokens to add to a step that has ``rows`` tokens already. The
        number is the limit, rounded so that all tokens of the step together fill whole tiles."""
        budget, begun = self.tokens if decoding else self.alone, rows % self.tile
        return budget - begun if 2 * begun <= self.tile else budget + self.tile - begun

    def observe(self, prefill_tokens: int, seconds: float, *, decoding: bool = True) -> None:
        """Adjust the limits to a step's time. With ``decoding``, the step also generated tokens."""
        if seconds <= 0:
            return
        if prefill_tokens == 0:
            weight = NEWEST_WEIGHT if self.decoding_s else 1.0
            self.decoding_s += weight * (seconds - self.decoding_s)
        elif decoding:
            target_s = max(self.target_s, MAX_SLOWDOWN * self.decoding_s)
            self.tokens = self._steered(self.tokens, prefill_tokens, target_s / seconds)
        else:
            target_s = ALONE_TARGETS * self.target_s
            self.alone = self._steered(self.alone, prefill_tokens, target_s / seconds)

    def _steered(self, tokens: int, prefill_tokens: int, ratio: float) -> int:
        """Return the new limit. ``ratio`` is the step's target time divided by its real time."""
        budget: float = tokens
        if ratio < 1:
            # Only prompt tokens can be cut, so they must make up for the whole excess.
            budget = max(prefill_tokens, self.minimum) * ratio
        elif prefill_tokens > tokens - self.tile and ratio > 1 / CALM_FRACTION:
            longest = max(tokens * MAX_GROWTH, tokens + self.tile)
            budget = min(tokens * ratio * CALM_FRACTION, longest)
        return self._bounded(budget)

    def _bounded(self, tokens: float) -> int:
        return min(self.maximum, max(self.minimum, int(tokens) // self.tile * self.tile))
