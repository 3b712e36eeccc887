"""What answers are held to: constraints, penalties, and stop tokens that are held back. As the
engine tells a device of it, and once more without an engine."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from engine.step.plan import Masks, TokenHistory
from engine.types import Request

PARTS = 3
"""A constraint allows one token of so many."""
WORD_BITS = 32
# Of those whose stop tokens are held back: else hardly anybody would come to one.
DENSE_STOPS = 4


class Third:
    """A constraint: every third token; which ones depends on all before."""

    def __init__(self, vocab_size: int, fails_at: int | None, fails_late: bool) -> None:
        """fails_at: where it raises, in tokens of the answer; at its mask, or late, when it is told
        which token was chosen."""
        self.fails_at = fails_at
        self.asked = 0
        """For masks."""
        self._fails_late = fails_late
        self._vocab_size = vocab_size
        self._count = self._sum = 0

    def fill_mask(self, row: np.ndarray) -> bool:
        self.asked += 1
        if self._count == self.fails_at and not self._fails_late:
            raise ValueError("a form that cannot be followed")
        bits = np.zeros(row.size * WORD_BITS, np.uint8)
        bits[(self._sum + self._count) % PARTS : self._vocab_size : PARTS] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.uint32)
        return True

    def accept(self, token_id: int) -> None:
        if self._count == self.fails_at:
            raise ValueError("a form that cannot be followed")
        self._count += 1
        self._sum += token_id

    def copy(self) -> "Third":
        raise AssertionError("nobody asks for choices")


def ruled(request: Request, rng: Random, vocab_size: int) -> Request:
    """The request, held to something."""
    held_back = rng.choice((0, 0, 5))
    stops = frozenset(range(0, vocab_size, DENSE_STOPS))
    params = replace(
        request.params,
        frequency_penalty=rng.choice((0.0, 1.0)),
        min_tokens=held_back,
        stop_token_ids=stops if held_back else request.params.stop_token_ids,
    )
    fails_at = rng.randrange(10) if rng.random() < 0.2 else None
    constraint = Third(vocab_size, fails_at, rng.random() < 0.5) if rng.random() < 0.6 else None
    return replace(request, params=params, constraint=constraint)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request is held to, from all of its tokens."""

    request: Request
    vocab_size: int

    def token(self, wanted: int, tokens: list[int]) -> int:
        """What follows these tokens, where the model wants this one."""
        params = self.request.params
        answer = tokens[len(self.request.prompt_ids) :]
        if params.penalises:
            wanted += sum(set(tokens)) + sum(answer)
        parts = PARTS if self.request.constraint is not None else 1
        stops = params.stop_token_ids if len(answer) < params.min_tokens else ()
        allowed = range((sum(answer) + len(answer)) % parts, self.vocab_size, parts)
        return _first([token for token in allowed if token not in stops], wanted % self.vocab_size)


def told(
    wanted: int, history: TokenHistory | None, masks: Masks | None, row: int, vocab: int
) -> int:
    """The same of a row, from what the engine says."""
    if history is not None:
        wanted += int((history.ids * (1 + history.generated)).sum())
    if masks is None:
        return wanted % vocab
    bits = np.unpackbits(masks.words[row].view(np.uint8), bitorder="little")[:vocab]
    return _first(np.flatnonzero(bits).tolist(), wanted % vocab)


def _first(allowed: list[int], wanted: int) -> int:
    """The first allowed token from the wanted one on, in a circle."""
    return next((token for token in allowed if token >= wanted), allowed[0])
