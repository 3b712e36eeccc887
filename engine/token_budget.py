"""How many tokens a step may compute, so that it takes about as long as it should."""

from dataclasses import dataclass

# A step's time is noisy and a prompt's later chunks are slower: grow by at most this factor, and
# react to a slow step at once.
MAX_GROWTH = 1.5
# Between this fraction of the target and the target itself nothing changes.
CALM_FRACTION = 0.8


@dataclass(slots=True)
class TokenBudget:
    """Prefill tokens per step, steered by measured step times.

    Only steps with prefill are measured: a step of decoding rows alone takes what it takes. Within
    [minimum, maximum], in tokens.
    """

    target_s: float
    minimum: int
    maximum: int
    tokens: int

    def __post_init__(self) -> None:
        """Checks the order of the limits."""
        assert 1 <= self.minimum <= self.tokens <= self.maximum
        assert self.target_s > 0

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """Takes in a step that computed so many prompt tokens."""
        if prefill_tokens == 0 or seconds <= 0:
            return
        ratio = self.target_s / seconds
        full = prefill_tokens >= self.tokens
        if ratio < 1:
            # The whole excess is the prefill's to give back.
            self._set(max(prefill_tokens, self.minimum) * ratio)
        elif full and ratio > 1 / CALM_FRACTION:
            self._set(self.tokens * min(ratio * CALM_FRACTION, MAX_GROWTH))

    def _set(self, tokens: float) -> None:
        self.tokens = min(self.maximum, max(self.minimum, int(tokens)))
