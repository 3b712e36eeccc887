"""The right answer of each request: RecallModel in whole numbers, and the rules of answers.

A token's slot is a number that follows from its own id and the slot before it, as K and V follow
from everything before them: it says nothing about the sequence that wrote it, so that prefixes can
be shared, and it can only be right when the past was right. The next token is a hash of slots 0..p
and the request's seed.
"""

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from random import Random

import numpy as np

from engine.step.plan import Masks, TokenHistory
from engine.step.sequence import Sequence
from engine.types import Request, SamplingParams, TokenLogprobs
from tests.kvcache.blocks import SLOT_BYTES

PARTS = 3
"""A constraint allows one token in three."""
WORD_BITS = 32
MOST_DRAFTS = 6


class Third:
    """A constraint to every third token; which ones depends on all tokens before."""

    def __init__(self, vocab_size: int, fails_at: int | None, fails_late: bool) -> None:
        """fails_at: the token of the answer at which it raises, at its mask, or late, when it
        accepts the chosen token."""
        self.fails_at = fails_at
        self.asked = 0
        """For masks."""
        self.copies: list[Third] = []
        """Those of the other answers, in order; then those for drafts."""
        self._fails_late = fails_late
        self._vocab_size = vocab_size
        self._count = self._sum = 0
        """Of the accepted tokens."""

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

    def __deepcopy__(self, _: object) -> "Third":
        made = Third(self._vocab_size, self.fails_at, self._fails_late)
        made._count, made._sum = self._count, self._sum
        self.copies.append(made)
        return made


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of an answer, applied to all of its tokens."""

    request: Request
    params: SamplingParams
    vocab_size: int

    def token(self, wanted: int, tokens: list[int]) -> int:
        """Return the token that follows these, where the model wants this one."""
        params = self.params
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
    """Return the same for a row, from the engine's own masks and histories."""
    if history is not None:
        wanted += int((history.ids * (1 + history.generated)).sum())
    if masks is None:
        return wanted % vocab
    bits = np.unpackbits(masks.words[row].view(np.uint8), bitorder="little")[:vocab]
    return _first(np.flatnonzero(bits).tolist(), wanted % vocab)


def _first(allowed: list[int], wanted: int) -> int:
    """Return the first allowed token from the wanted one on, in a circle."""
    return next((token for token in allowed if token >= wanted), allowed[0])


SLOT_MASK = 2**64 - 1
MULTIPLIER = 6364136223846793005  # Knuth's, for 64 bits
INCREMENT = 1442695040888963407


def slots_after(last: int, token_ids: Iterable[int]) -> "array[int]":
    """Return the slots of these tokens, when the slot before them holds ``last``; 0 before the
    first."""
    slots = array("Q")
    for token in token_ids:
        last = (last * MULTIPLIER + INCREMENT + token) & SLOT_MASK
        slots.append(last)
    return slots


def next_token(slots: bytes, seed: int, index: int, vocab_size: int) -> int:
    """Return the token that follows slots 0..p, by the noise of this token of the answer."""
    salt, person = seed.to_bytes(8, "little"), index.to_bytes(8, "little")
    digest = blake2b(slots, digest_size=8, salt=salt, person=person).digest()
    return int.from_bytes(digest, "little") % vocab_size


def score(slots: bytes, token: int) -> TokenLogprobs:
    """Return the log probability of the token after slots 0..p."""
    digest = blake2b(slots, digest_size=6, salt=token.to_bytes(8, "little")).digest()
    return TokenLogprobs(-float(int.from_bytes(digest, "little")), ())


def vector(slots: bytes) -> np.ndarray:
    """Return the vector into which slots 0..p are pooled."""
    return np.frombuffer(blake2b(slots, digest_size=8).digest(), np.uint8).astype(np.float32)


class Recall:
    """One request's answer, computed without a cache."""

    def __init__(
        self, prompt_ids: Iterable[int], seed: int, vocab_size: int, rules: Rules | None = None
    ) -> None:
        self._tokens = list(prompt_ids)
        self._num_prompt = len(self._tokens)
        self._rules = rules
        self._slots = slots_after(0, self._tokens)
        self._seed = seed
        self._vocab_size = vocab_size

    def token(self, position: int) -> int:
        self._grow(position + 1)
        return self._tokens[position]

    def tokens(self, count: int) -> list[int]:
        self._grow(count)
        return self._tokens[:count]

    def slots(self, count: int) -> bytes:
        self._grow(count)
        return self._slots[:count].tobytes()

    def count_right(self, position: int, tokens: Iterable[int]) -> int:
        """Return how many of these tokens are right from the position on, before the first that is
        not."""
        right = takewhile(
            lambda place: self.token(place[0]) == place[1], enumerate(tokens, position)
        )
        return sum(1 for _ in right)

    def scores(self, prompt_tokens: int) -> tuple[TokenLogprobs | None, ...]:
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
            index = len(self._tokens) - self._num_prompt
            token = next_token(self._slots.tobytes(), self._seed, index, self._vocab_size)
            if self._rules is not None:
                token = self._rules.token(token, self._tokens)
            self._tokens.append(token)
            self._slots.extend(slots_after(self._slots[-1], [token]))


@dataclass(slots=True)
class Foretelling:
    """Drafts what each answer is going to be, with mistakes."""

    recall: Callable[[int], Recall]
    """The reference of a request."""
    rng: Random
    mistakes: float
    """The share of drafts that are drawn."""
    vocab_size: int

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        return self.rng.random() < 0.5

    def depth(self, sequence: Sequence, room: int, running: int, *, idle: bool) -> int:
        return min(room, self.rng.randint(0, MOST_DRAFTS))

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [self._drafts(sequence, depth) for sequence, depth in wanted]

    def _drafts(self, sequence: Sequence, depth: int) -> tuple[int, ...]:
        rng, known = self.rng, sequence.num_tokens
        after = self.recall(sequence.seq_id).tokens(known + depth)[known:]
        return tuple(
            rng.randrange(self.vocab_size) if rng.random() < self.mistakes else token
            for token in after
        )

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        assert 0 <= kept <= drafts

    def observe(self, rows: int, seconds: float, interval_s: float) -> None:
        assert rows > 0
