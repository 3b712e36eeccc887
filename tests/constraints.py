"""Constraints that tests can foretell."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Allowed = Callable[[list[int]], set[int] | None]
"""From the tokens that were accepted: which may follow; None: all."""


@dataclass
class Scripted:
    """Follows a function of what was accepted."""

    allowed: Allowed
    accepted: list[int] = field(default_factory=list)
    fills_until: int | None = None
    """Its mask fails when so many tokens were accepted."""
    accepts_until: int | None = None
    """It fails on the token after so many."""
    copies: "list[Scripted]" = field(default_factory=list)

    def fill_mask(self, row: np.ndarray) -> bool:
        if len(self.accepted) == self.fills_until:
            raise ValueError("text of an answer")
        tokens = self.allowed(self.accepted)
        if tokens is None:
            return False
        row.fill(0)
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token_id: int) -> None:
        if len(self.accepted) == self.accepts_until:
            raise ValueError("text of an answer")
        self.accepted.append(token_id)

    def copy(self) -> "Scripted":
        assert not self.accepted
        made = Scripted(self.allowed, [], self.fills_until, self.accepts_until)
        self.copies.append(made)
        return made


def every_third(vocab_size: int) -> Allowed:
    """A third of all tokens; which of them depends on each token before, and on their number."""

    def allowed(accepted: list[int]) -> set[int]:
        return set(range((sum(accepted) + len(accepted)) % 3, vocab_size, 3))

    return allowed
