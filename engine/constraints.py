"""Which tokens may come next, one bit each: from constraints, and from ``min_tokens``.

One array of words for all rows of a step goes to the device, where the bits become minus infinity
in the logits. What a constraint raises ends its own request and nothing else.
"""

import logging
import time
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.errors import FORM_LIMITS, FormLimitError
from engine.types import Sampled, Sequence

log = logging.getLogger(__name__)

WORD_BITS = 32
BROKEN = "the rules for the answer's form could not be followed"


# What is added to eight logits for a byte of bits, the lowest first.
ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 0, -np.inf)
ADDED = ADDED[:, ::-1].astype(np.float32)
ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of one step."""

    words: np.ndarray
    """uint32 ``[R, ceil(vocab / 32)]``, bit i % 32 of word i // 32: token i is allowed."""
    broken: dict[int, str]
    """Rows whose constraint has failed, and why: fit for clients."""

    def apply(self, logits: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]`` with minus infinity where a token is not allowed."""
        rows, vocab = logits.shape
        # Adding eight numbers of a table for each byte takes a third of what choosing takes.
        added = mx.array(ADDED)[mx.array(self.words.view(np.uint8))].reshape(rows, -1)
        return logits + (added if added.shape[1] == vocab else added[:, :vocab])

    def forbidden(self, tokens: list[int]) -> list[int]:
        """Return the rows whose token is not allowed."""
        return [
            row
            for row, token in enumerate(tokens)
            if not self.words.item(row, token // WORD_BITS) >> token % WORD_BITS & 1
        ]


class MaskThread:
    """Makes masks while the engine's thread waits for the device. It never touches MLX; between
    ``begin`` and the result nobody else may touch the constraints."""

    def __init__(self) -> None:
        """The thread begins with the first masks, and ends when this object does."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, sequences: SequenceOf[Sequence], vocab_size: int) -> Future[Masks]:
        """Return the masks of a batch, one row for each sequence."""
        return self._executor.submit(fill_masks, sequences, vocab_size)


def is_masked(sequence: Sequence) -> bool:
    """Return whether the next token of a sequence must be one of some."""
    return sequence.request.constraint is not None or _holds_back_stops(sequence)


def fill_masks(sequences: SequenceOf[Sequence], vocab_size: int) -> Masks:
    """Return the masks of a batch, one row for each sequence."""
    words: np.ndarray = np.empty((len(sequences), -(-vocab_size // WORD_BITS)), np.uint32)
    broken: dict[int, str] = {}
    for number, sequence in enumerate(sequences):
        row, started_s = words[number], time.thread_time()
        try:
            filled = _fill(sequence, row)
        except Exception as error:
            broken[number] = _why(sequence, error)
            filled = False
        if not filled:
            row.fill(ALL)
        sequence.note_mask(time.thread_time() - started_s)
    for number in np.flatnonzero(~words.any(axis=1)).tolist():
        log.warning("the constraint of %s allows no token", sequences[number].request.name)
        broken[number] = BROKEN
    return Masks(words, broken)


def accept(
    sequences: SequenceOf[Sequence], results: list[Sampled], broken: dict[int, str]
) -> list[Sampled]:
    """Tell the constraints which tokens were chosen; return the results, without tokens where a
    constraint is broken."""
    return [
        _broken_off(result, broken.get(row) or _refusal(sequence, result))
        for row, (sequence, result) in enumerate(zip(sequences, results, strict=True))
    ]


# --- one row -----------------------------------------------------------------------------------


def _holds_back_stops(sequence: Sequence) -> bool:
    params = sequence.request.params
    return sequence.num_generated < params.min_tokens and bool(params.stop_token_ids)


def _fill(sequence: Sequence, row: np.ndarray) -> bool:
    """Fill a row; False when all tokens are allowed."""
    constraint = sequence.request.constraint
    filled = constraint is not None and constraint.fill_mask(row)
    if not _holds_back_stops(sequence):
        return filled
    if not filled:
        row.fill(ALL)
    complete = row.copy()
    for token in sequence.request.params.stop_token_ids:
        if token < row.size * WORD_BITS:
            row[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    if not row.any():
        row[:] = complete  # the answer is complete: nothing but a stop token may follow
    return True


def _refusal(sequence: Sequence, result: Sampled) -> str | None:
    """Return why the constraint does not take the token; None where it does."""
    constraint = sequence.request.constraint
    if constraint is None or result.token_id is None:
        return None
    try:
        constraint.accept(result.token_id)
    except Exception as error:
        return _why(sequence, error)
    return None


def _broken_off(result: Sampled, why: str | None) -> Sampled:
    # A row that was not finite stays one: that is the worse fault.
    return result if why is None or result.token_id is None else Sampled(None, message=why)


def _why(sequence: Sequence, error: Exception) -> str:
    """Return what the request's client is told."""
    if isinstance(error, FormLimitError):
        return f"{FORM_LIMITS}: {error}"
    # Its text may hold some of the answer.
    log.warning("the constraint of %s raised %s", sequence.request.name, type(error).__name__)
    return BROKEN
