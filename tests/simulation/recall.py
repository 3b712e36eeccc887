"""RecallModel for the simulator: whole numbers instead of arrays, and forks that differ.

A token's slot is a number that follows from its own id and the slot before it, as K and V follow
from everything before them: it says nothing about the sequence that wrote it, so that prefixes can
be shared, and it can only be right when the past was right. The next token is a hash of slots 0..p
and the request's seed.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from engine.types import TokenLogprobs
from tests.kvcache.blocks import SLOT_BYTES
from tests.simulation.rules import Rules

SLOT_MASK = 2**64 - 1
MULTIPLIER = 6364136223846793005  # Knuth's, for 64 bits
INCREMENT = 1442695040888963407


def slots_after(last: int, token_ids: Iterable[int]) -> "array[int]":
    """What stands in the slots of these tokens, when the slot before them holds ``last``; 0 before
    the first."""
    slots = array("Q")
    for token in token_ids:
        last = (last * MULTIPLIER + INCREMENT + token) & SLOT_MASK
        slots.append(last)
    return slots


def next_token(slots: bytes, seed: int, vocab_size: int) -> int:
    """The token that follows slots 0..p."""
    digest = blake2b(slots, digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") % vocab_size


def score(slots: bytes, token: int) -> TokenLogprobs:
    """How likely the token is after slots 0..p."""
    digest = blake2b(slots, digest_size=6, salt=token.to_bytes(8, "little")).digest()
    return TokenLogprobs(-float(int.from_bytes(digest, "little")), ())


def vector(slots: bytes) -> np.ndarray:
    """What slots 0..p are pooled into."""
    return np.frombuffer(blake2b(slots, digest_size=8).digest(), np.uint8).astype(np.float32)


class Recall:
    """One request's answer, computed without a cache."""

    def __init__(
        self, prompt_ids: Iterable[int], seed: int, vocab_size: int, rules: Rules | None = None
    ) -> None:
        self._tokens = list(prompt_ids)
        self._rules = rules
        self._slots = slots_after(0, self._tokens)
        self._seed = seed
        self._vocab_size = vocab_size

    def token(self, position: int) -> int:
        """The token at a position, of the prompt or of the answer."""
        self._grow(position + 1)
        return self._tokens[position]

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens."""
        self._grow(count)
        return self._tokens[:count]

    def slots(self, count: int) -> bytes:
        """What the first ``count`` slots must hold."""
        self._grow(count)
        return self._slots[:count].tobytes()

    def scores(self, prompt_tokens: int) -> tuple[TokenLogprobs | None, ...]:
        """How likely each token of the prompt was."""
        slots = self.slots(prompt_tokens)
        return (
            None,
            *(
                score(slots[: place * SLOT_BYTES], self._tokens[place])
                for place in range(1, prompt_tokens)
            ),
        )

    def _grow(self, count: int) -> None:
        while len(self._tokens) < count:
            token = next_token(self._slots.tobytes(), self._seed, self._vocab_size)
            if self._rules is not None:
                token = self._rules.token(token, self._tokens)
            self._tokens.append(token)
            self._slots.extend(slots_after(self._slots[-1], [token]))
