"""Log-probabilities of prompts, read from rows of a step."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import mlx.core as mx

from engine.logprobs import Logprobs
from engine.step_plan import PlanEntry
from engine.types import Sampled, TokenLogprobs

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
        shift = first - entry.start
        rows += range(entry.scores.start + shift, entry.scores.stop + shift)
        first += entry.count
    return rows


def score(head: Head, states: mx.array, entries: SequenceOf[PlanEntry]) -> list[Sampled]:
    """Return the scores of each entry that scores, as results without a token.

    states: ``[R, hidden]``, evaluated: the rows of ``scored_rows``. The logits of no more than
    SCORED_ROWS_AT_ONCE of them are ever there at once.
    """
    scoring = [entry for entry in entries if entry.scores]
    tokens = [e.sequence.token_ids[place + 1] for e in scoring for place in e.scores]
    num_tops = [e.sequence.request.params.prompt_logprobs for e in scoring for _ in e.scores]
    scores: list[TokenLogprobs | None] = []
    for start in range(0, len(tokens), SCORED_ROWS_AT_ONCE):
        part = slice(start, start + SCORED_ROWS_AT_ONCE)
        scores += _score(head(states[part]), tokens[part], num_tops[part])
    rest = iter(scores)
    return [Sampled(None, scored=_all_of([next(rest) for _ in e.scores])) for e in scoring]


def joined(
    entries: SequenceOf[PlanEntry], sampled: SequenceOf[Sampled], scored: SequenceOf[Sampled]
) -> list[Sampled]:
    """Return one result for each entry that has one. sampled, scored: the results of the entries
    that sample, and of those that score."""

    def results() -> Iterator[Sampled]:
        samples, scores = iter(sampled), iter(scored)
        for entry in entries:
            if entry.has_result:
                result = next(samples) if entry.samples else Sampled(None)
                yield result._replace(scored=next(scores).scored) if entry.scores else result

    return list(results())


def _score(
    logits: mx.array, tokens: list[int], num_tops: list[int | None]
) -> list[TokenLogprobs | None]:
    """Return the scores of rows; None for a row that is not finite."""
    raw = logits.astype(mx.float32)
    finite = mx.isfinite(raw.sum(axis=-1))
    logprobs = Logprobs.of(raw, mx.array(tokens), num_tops)
    assert logprobs is not None
    mx.eval(finite, *logprobs.arrays)
    good: list[bool] = finite.tolist()  # type: ignore[assignment]
    return [value if ok else None for value, ok in zip(logprobs.read(), good, strict=True)]


def _all_of(scores: list[TokenLogprobs | None]) -> tuple[TokenLogprobs, ...] | None:
    """Return all scores; None where one of them is missing."""
    found = tuple(value for value in scores if value is not None)
    return found if len(found) == len(scores) else None
