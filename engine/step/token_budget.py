"""How many tokens a step may compute, so that it takes about as long as it should."""

import math
from dataclasses import dataclass, field

# A step's time is noisy and a prompt's later chunks are slower: grow by at most this factor, and
# react to a slow step at once.
MAX_GROWTH = 1.5
# Between this fraction of the target and the target itself nothing changes.
CALM_FRACTION = 0.8
# A step of prompts alone may take this many times the target: it delays no sequence's next token.
ALONE_TARGETS = 5.0
# Where decoding alone takes most of the target, prompts would starve: beside them a step may take
# this many times as long as without.
MAX_SLOWDOWN = 3.0
# Weight of the newest step of decoding alone in the mean of their times.
NEWEST_WEIGHT = 0.2
# Rows that MLX's products and its attention of prompts compute together on a GPU: fewer take as
# long (mlx/backend/metal/quantized.cpp).
GPU_TILE_ROWS = 32


@dataclass(slots=True)
class TokenBudget:
    """Prefill tokens per step, steered by measured step times. Within [minimum, maximum], in
    tokens; whole tiles, where the maximum has room for one."""

    target_s: float
    minimum: int
    maximum: int
    tokens: int
    """Beside rows that decode."""
    tile: int = 1
    """Rows that the device computes together: a step of fewer takes as long."""
    alone: int = field(init=False)
    """In a step of prompts alone."""
    decoding_s: float = field(default=0.0, init=False)
    """The mean time of steps without prefill; 0 before the first one."""

    def __post_init__(self) -> None:
        """Check the order of the limits."""
        assert 1 <= self.minimum <= self.tokens <= self.maximum
        assert self.target_s > 0
        assert self.tile >= 1
        if self.maximum >= self.tile:
            self.maximum -= self.maximum % self.tile
        self.minimum = min(self.maximum, math.ceil(self.minimum / self.tile) * self.tile)
        self.tokens = self.alone = self._bounded(self.tokens)

    def room(self, *, decoding: bool, rows: int = 0) -> int:
        """Return the budget of a step with rows that decode, or without any. rows: that the step
        has already; together they are whole tiles, about as many as the budget has."""
        budget, begun = self.tokens if decoding else self.alone, rows % self.tile
        return budget - begun if 2 * begun <= self.tile else budget + self.tile - begun

    def observe(self, prefill_tokens: int, seconds: float, *, decoding: bool = True) -> None:
        """Take in a step with that many prompt tokens. decoding: beside rows that decode."""
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
        """Return a budget after a step. ratio: of its target to its time."""
        budget: float = tokens
        if ratio < 1:
            # The prefill alone has to make up for the whole excess.
            budget = max(prefill_tokens, self.minimum) * ratio
        elif prefill_tokens > tokens - self.tile and ratio > 1 / CALM_FRACTION:
            # A small budget grows by a tile.
            longest = max(tokens * MAX_GROWTH, tokens + self.tile)
            budget = min(tokens * ratio * CALM_FRACTION, longest)
        return self._bounded(budget)

    def _bounded(self, tokens: float) -> int:
        """Return whole tiles, within the limits."""
        return min(self.maximum, max(self.minimum, int(tokens) // self.tile * self.tile))
