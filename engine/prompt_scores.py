"""Log-probabilities of prompts, read from rows of a step."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import mlx.core as mx

from engine.logprobs import Logprobs
from engine.step_plan import NOT_FINITE, Outcome, PlanEntry, RowError, Scores, Token
from engine.types import TokenLogprobs

# Rows whose logits are in memory at the same time: 32 of a vocabulary of 150,000 are 20 MB.
SCORED_ROWS_AT_ONCE = 32

Head = Callable[[mx.array], mx.array]
"""Logits ``[R, vocab]`` of states ``[R, hidden]``."""


def scored_rows(entries: SequenceOf[PlanEntry]) -> list[int]:
    """Return the rows of the step's flat token array at which the next token of a prompt is
    scored."""
    rows: list[int] = []
    first = 0
    for entry in entries:
        if entry.scoring is not None:
            start = first + entry.scoring.start - entry.start
            rows += range(start, start + len(entry.scoring.next_tokens))
        first += entry.count
    return rows


def score(head: Head, states: mx.array, entries: SequenceOf[PlanEntry]) -> list[Scores | RowError]:
    """Return the scores of each entry that scores; an error where one is not finite.

    states: ``[R, hidden]``, evaluated: the rows of ``scored_rows``. The logits of no more than
    SCORED_ROWS_AT_ONCE of them are ever there at once.
    """
    scorings = [entry.scoring for entry in entries if entry.scoring is not None]
    tokens = [token for scoring in scorings for token in scoring.next_tokens]
    num_tops = [scoring.num_top for scoring in scorings for _ in scoring.next_tokens]
    scores: list[TokenLogprobs | None] = []
    for start in range(0, len(tokens), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        scores += _score(head(states[part]), tokens[part], num_tops[part])
    rest = iter(scores)
    return [_scores([next(rest) for _ in scoring.next_tokens]) for scoring in scorings]


def joined(
    entries: SequenceOf[PlanEntry],
    sampled: SequenceOf[Outcome],
    scored: SequenceOf[Scores | RowError],
) -> list[Outcome]:
    """Return one outcome for each entry that has one. sampled, scored: those of the entries that
    sample, and of those that score."""
    samples, scores = iter(sampled), iter(scored)
    outcomes: list[Outcome] = []
    for entry in entries:
        then = next(samples) if entry.sampling is not None else None
        found = next(scores) if entry.scoring is not None else None
        if isinstance(found, Scores) and isinstance(then, Token | RowError):
            found = found._replace(then=then)
        outcome = then if found is None else found
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def _score(logits: mx.array, tokens: list[int], num_tops: list[int]) -> list[TokenLogprobs | None]:
    """Return the scores of rows; None for a row that is not finite."""
    raw = logits.astype(mx.float32)
    finite = mx.isfinite(raw.sum(axis=-1))
    logprobs = Logprobs.of(raw, mx.array(tokens), num_tops)
    assert logprobs is not None
    mx.eval(finite, *logprobs.arrays)
    good: list[bool] = finite.tolist()  # type: ignore[assignment]
    return [value if ok else None for value, ok in zip(logprobs.read(), good, strict=True)]


def _scores(found: list[TokenLogprobs | None]) -> Scores | RowError:
    """Return all scores of an entry; an error where one of them is missing."""
    finite = tuple(value for value in found if value is not None)
    return Scores(finite) if len(finite) == len(found) else NOT_FINITE
