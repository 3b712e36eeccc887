"""Makes the SamplingState of a step: masks of allowed tokens, and histories for penalties. An
exception of a constraint (an answer's grammar) ends only the constraint's own request."""

import logging
import time
from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.step.plan import WORD_BITS, Masks, Outcome, RowError, SamplingState, Scores, Token
from engine.step.sequence import Sequence
from engine.types import FORM_LIMITS, FormLimitError

log = logging.getLogger(__name__)

BROKEN = "the rules for the answer's form could not be followed"
ALL = np.uint32(0xFFFFFFFF)


def sampling_state(sequences: SequenceOf[Sequence | None], vocab_size: int) -> SamplingState:
    """Return the state for sampling. ``sequences`` has None for a row whose sequence has ended.

    Any thread may call this, when all earlier tokens are known. During the call no other thread may
    use the sequences or their constraints.
    """
    is_masked = any(sequence is not None and _is_masked(sequence) for sequence in sequences)
    masks = _masks(sequences, vocab_size) if is_masked else None
    return SamplingState(masks, [None if each is None else each.history for each in sequences])


def _is_masked(sequence: Sequence) -> bool:
    return sequence.constraint is not None or _holds_back_stops(sequence)


def _masks(sequences: SequenceOf[Sequence | None], vocab_size: int) -> Masks:
    words: np.ndarray = np.empty((len(sequences), -(-vocab_size // WORD_BITS)), np.uint32)
    broken: dict[int, str] = {}
    for number, sequence in enumerate(sequences):
        row, started_s = words[number], time.thread_time()
        if sequence is None:
            row.fill(ALL)
            continue
        try:
            filled = _fill(sequence, row)
        except Exception as error:
            broken[number] = _why(sequence, error)
            filled = False
        if not filled:
            row.fill(ALL)
        sequence.note_mask(time.thread_time() - started_s)
        if not row.any():
            log.warning("the constraint of %s allows no token", sequence.request.name)
            broken[number] = BROKEN
    return Masks(words, broken)


def accept(sequence: Sequence, outcome: Outcome) -> Outcome:
    """Pass the outcome's token to the sequence's constraint. Return the outcome, or a RowError if
    the constraint raises an exception."""
    constraint = sequence.constraint
    if constraint is None:
        return outcome
    if isinstance(outcome, Scores) and outcome.then is not None:
        then = accept(sequence, outcome.then)
        assert isinstance(then, Token | RowError)
        return outcome._replace(then=then)
    if not isinstance(outcome, Token):
        return outcome
    try:
        constraint.accept(outcome.token_id)
    except Exception as error:
        return RowError(_why(sequence, error))
    return outcome


def _holds_back_stops(sequence: Sequence) -> bool:
    return sequence.params.holds_back_stops(sequence.num_generated)


def _fill(sequence: Sequence, row: np.ndarray) -> bool:
    """Fill a sequence's row of a mask, and return True. If every token may come next, return False;
    the row is then undefined."""
    constraint = sequence.constraint
    filled = constraint is not None and constraint.fill_mask(row)
    if not _holds_back_stops(sequence):
        return filled
    if not filled:
        row.fill(ALL)
    complete = row.copy()
    for token in sequence.params.stop_token_ids:
        if token < row.size * WORD_BITS:
            row[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    if not row.any():
        row[:] = complete  # the answer is complete: only stop tokens may follow
    return True


def _why(sequence: Sequence, error: Exception) -> str:
    """Return the error message for the client, without contents of the answer."""
    if isinstance(error, FormLimitError):
        return f"{FORM_LIMITS}: {error}"
    # Log only the type: the error's text may contain parts of the answer.
    log.warning("the constraint of %s raised %s", sequence.request.name, type(error).__name__)
    return BROKEN
