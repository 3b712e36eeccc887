"""Makes the SamplingState of a step: masks of allowed tokens, and histories for penalties. An
exception of a constraint (an answer's grammar) ends only the constraint's own request."""

import logging
import time
from collections.abc import Sequence as SequenceOf
from copy import deepcopy

import numpy as np

from engine.step.plan import WORD_BITS, Masks, Outcome, RowError, SamplingState, Scores, Token
from engine.step.sequence import SamplingRow, Sequence
from engine.types import FORM_LIMITS, FormLimitError, TokenConstraint

log = logging.getLogger(__name__)

BROKEN = "the rules for the answer's form could not be followed"
ALL = np.uint32(0xFFFFFFFF)


def sampling_state(rows: SequenceOf[SamplingRow], vocab_size: int) -> SamplingState:
    """Return the state for sampling.

    Any thread may call this, when all earlier tokens are known. During the call no other thread may
    use the sequences or their constraints.
    """
    masks = _masks(rows, vocab_size) if any(map(_is_masked, rows)) else None
    return SamplingState(masks, [row.history for row in rows])


def _is_masked(row: SamplingRow) -> bool:
    sequence = row.sequence
    return sequence is not None and (sequence.constraint is not None or _holds_back_stops(row))


def _masks(rows: SequenceOf[SamplingRow], vocab_size: int) -> Masks:
    words: np.ndarray = np.empty((len(rows), -(-vocab_size // WORD_BITS)), np.uint32)
    broken: dict[int, str] = {}
    spent_s: dict[Sequence, float] = {}
    constraint: TokenConstraint | None = None
    for number, each in enumerate(rows):
        row, started_s, sequence = words[number], time.thread_time(), each.sequence
        if sequence is None:
            row.fill(ALL)
            continue
        try:
            constraint = _after_drafts(each, constraint)
            filled = _fill(each, constraint, row)
        except Exception as error:
            broken[number] = _why(sequence, error)
            filled = False
        if not filled:
            row.fill(ALL)
        spent_s[sequence] = spent_s.get(sequence, 0.0) + time.thread_time() - started_s
        if not row.any():
            log.warning("the constraint of %s allows no token", sequence.request.name)
            broken[number] = BROKEN
    for sequence, seconds in spent_s.items():
        sequence.note_mask(seconds)
    return Masks(words, broken)


def _after_drafts(row: SamplingRow, before: TokenConstraint | None) -> TokenConstraint | None:
    """Return a row's constraint, advanced by its drafts. ``before`` is that of the row before,
    which has one draft fewer."""
    assert row.sequence is not None
    if not row.drafts or before is None:
        return row.sequence.constraint
    after = deepcopy(before) if before is row.sequence.constraint else before
    after.accept(row.drafts[-1])
    return after


def allowed_drafts(
    constraint: TokenConstraint, drafts: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """Return the drafts before the first one that the constraint forbids."""
    ahead, row = deepcopy(constraint), np.empty(-(-vocab_size // WORD_BITS), np.uint32)
    for number, token in enumerate(drafts):
        try:
            held = ahead.fill_mask(row)
            if held and not row[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & 1:
                return drafts[:number]
            ahead.accept(token)
        except Exception:
            return drafts[:number]  # the constraint itself will raise this, if an answer gets here
    return drafts


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


def _holds_back_stops(row: SamplingRow) -> bool:
    sequence = row.sequence
    assert sequence is not None
    return sequence.params.holds_back_stops(sequence.num_generated + len(row.drafts))


def _fill(of: SamplingRow, constraint: TokenConstraint | None, row: np.ndarray) -> bool:
    """Fill one row of a mask, and return True. If every token may come next, return False; the row
    is then undefined."""
    sequence = of.sequence
    assert sequence is not None
    filled = constraint is not None and constraint.fill_mask(row)
    if not _holds_back_stops(of):
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
