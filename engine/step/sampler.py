"""Samples token ids from logits: one row per sequence, each with its own parameters.

A row's result does not depend on the other rows: operations never mix rows, and noise depends only
on the request's seed, the number of its generated tokens, and the token's id.
"""

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from engine.step.plan import (
    NOT_FINITE,
    Masks,
    Outcome,
    PlanEntry,
    RowError,
    Sampling,
    SamplingState,
    Scores,
    Token,
    TokenHistory,
    Vector,
    Verified,
)
from engine.types import SamplingParams, TokenLogprobs
from metal_ext import CpuWorkers, choose_tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities for rows of logits, as arrays that are not evaluated yet."""

    num_tops: SequenceOf[int | None]
    chosen: mx.array
    top_ids: mx.array | None
    top: mx.array | None

    @classmethod
    def of(
        cls, raw: mx.array, ids: mx.array, num_tops: SequenceOf[int | None]
    ) -> "Logprobs | None":
        """Return the log-probabilities to report, or None if no row reports any.

        ``raw`` is float32 logits ``[R, vocab]``, and ``ids`` is the chosen tokens ``[R]``.
        ``num_tops`` has each row's number of alternatives, None for a row that reports nothing.
        """
        if all(n is None for n in num_tops):
            return None
        logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, ids[:, None].astype(mx.int32), axis=-1)[:, 0]
        max_tops = min(max(n or 0 for n in num_tops), raw.shape[-1])
        if max_tops == 0:
            return cls(num_tops, chosen, None, None)
        places = mx.argpartition(-logprobs, max_tops - 1, axis=-1)[:, :max_tops]
        return cls(num_tops, chosen, places, mx.take_along_axis(logprobs, places, axis=-1))

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.chosen, self.top_ids, self.top) if a is not None]

    def read(self) -> list[TokenLogprobs | None]:
        """Return each row's log-probabilities; the arrays must have been evaluated."""
        result: list[TokenLogprobs | None] = []
        chosen: list[float] = self.chosen.tolist()  # type: ignore[assignment]
        # Copy whole arrays, because a slice is a new operation that waits for the running step.
        ids, values = self._top()
        for row, count in enumerate(self.num_tops):
            if count is None:
                result.append(None)
                continue
            top: list[tuple[int, float]] = []
            if count:
                pairs = zip(ids[row], values[row], strict=True)
                top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            result.append(TokenLogprobs(chosen[row], tuple(top[:count])))
        return result

    def _top(self) -> tuple[list[list[int]], list[list[float]]]:
        if self.top_ids is None or self.top is None:
            return [], []
        return self.top_ids.tolist(), self.top.tolist()  # type: ignore[return-value]


# For each value of a mask's byte, the summands (0 or -inf) for the logits of its eight tokens.
ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 0, -np.inf)
ADDED = ADDED[:, ::-1].astype(np.float32)
# Rows without penalties get this history: a token and a count that change no logit.
NO_HISTORY = TokenHistory(np.zeros(1, np.int32), np.zeros(1, np.float32))


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """The arrays of outcomes on the device, and a function that reads the evaluated arrays."""

    arrays: list[mx.array]
    read: Callable[[], SequenceOf[Outcome]]


def sample(
    logits: mx.array,
    rows: SequenceOf[Sampling],
    state: SamplingState | None = None,
    workers: CpuWorkers | None = None,
) -> PendingSamples:
    """Choose the next token of each row. The first array of the result holds the token ids.

    ``logits`` is ``[R, vocab]`` of any float type. ``state`` is None if no row needs masks or
    penalties. ``workers`` is None on a GPU.
    """
    masks, histories = (None, [None] * len(rows)) if state is None else state
    raw = logits.astype(mx.float32)
    params = [row.params for row in rows]
    adjusted = _adjust(raw, params, histories)
    if masks is not None:
        adjusted = _mask(adjusted, masks)
    keys = _noise_keys(rows)
    if workers is None:
        ids = _choose(adjusted, params, keys)
        # One non-finite number makes the sum of its row non-finite.
        finite = mx.isfinite(raw.sum(axis=-1))
    else:
        choices = _choices(params, raw.shape[-1])
        ids, finite = choose_tokens(raw, adjusted, choices, keys, noise_table(), workers)
    num_tops = [p.logprobs for p in params]
    reported = Logprobs.of(raw, ids, num_tops)
    arrays = [ids, finite, *(reported.arrays if reported else [])]

    def read() -> list[Token | RowError]:
        tokens: list[int] = ids.tolist()  # type: ignore[assignment]
        good: list[bool] = finite.tolist()  # type: ignore[assignment]
        logprob_rows = reported.read() if reported else [None] * len(tokens)
        broken = {} if masks is None else masks.broken
        return [
            _outcome(Token(token, logprob), ok, broken.get(row))
            for row, (token, ok, logprob) in enumerate(zip(tokens, good, logprob_rows, strict=True))
        ]

    return PendingSamples(arrays, read)


def _outcome(token: Token, is_finite: bool, why_broken: str | None) -> Token | RowError:
    if not is_finite:
        return NOT_FINITE
    return token if why_broken is None else RowError(why_broken)


@cache
def noise_table() -> mx.array:
    """Return values and slopes of Gumbel noise for 32-bit integers, ``[2, 65536]`` float32.

    An integer h stands for v = h / 2**32 modulo 1, with the noise -log(-log(1 - v)): -3.1 to 22.9.
    The upper half of the bits of float32(h), h signed, is an index; value + slope * lower half is
    the noise, to 1e-5. It has the same bits on a GPU and in choose_tokens; logarithms have not.
    """
    starts = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    # Bits of numbers that no integer becomes count as those of the nearest that one does.
    sizes = np.fmin(np.fmax(np.abs(starts), 0.5), 2.0**31)
    v = sizes.astype(np.float64) * 2.0**-32
    values = -np.log(-np.where(np.signbit(starts), np.log(v), np.log1p(-v)))
    slopes = np.diff(values, append=0.0) * 2.0**-16
    return mx.array(np.stack([values, slopes]).astype(np.float32))


def noise(keys: mx.array, vocab: int) -> mx.array:
    """Return the noise of each token ``[R, vocab]`` for rows' ``keys``, as choose_tokens makes it.
    Ids are hashed by "lowbias32" (Wellons), with the key mixed in."""
    mixed = mx.arange(vocab, dtype=mx.uint32) ^ keys[:, :1]
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15) ^ keys[:, 1:]) * 0x846CA68B
    hashed = (mixed ^ (mixed >> 16)).view(mx.int32)
    bits = hashed.astype(mx.float32).view(mx.uint32)
    values, slopes = noise_table()
    return values[bits >> 16] + slopes[bits >> 16] * (bits & 0xFFFF).astype(mx.float32)


def _noise_keys(rows: SequenceOf[Sampling]) -> mx.array:
    """Return the keys of the rows' noise, as an array ``[R, 2]`` of uint32."""
    packed = [struct.pack("<QQ", row.params.seed, row.num_generated) for row in rows]
    keys = b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in packed)
    return mx.array(np.frombuffer(keys, "<u4").reshape(-1, 2))


def _adjust(
    logits: mx.array, params: SequenceOf[SamplingParams], histories: SequenceOf[TokenHistory | None]
) -> mx.array:
    changing = [i for i, p in enumerate(params) if p.changes_logits]
    if not changing:
        return logits
    where = mx.array(changing)
    changed = logits[where]
    changing_params = [params[i] for i in changing]
    changed = _bias(
        _penalise(changed, changing_params, [histories[i] for i in changing]), changing_params
    )
    if len(changing) == len(params):
        return changed
    result = logits * 1
    result[where] = changed
    return result


def _mask(logits: mx.array, masks: Masks) -> mx.array:
    """Return the logits ``[R, vocab]`` with minus infinity where a token is not allowed."""
    rows, vocab = logits.shape
    # To add 0 or -inf from a table takes a third of the time of mx.where.
    added = mx.array(ADDED)[mx.array(masks.words.view(np.uint8))].reshape(rows, -1)
    return logits + (added if added.shape[1] == vocab else added[:, :vocab])


def _penalise(
    logits: mx.array, params: SequenceOf[SamplingParams], histories: SequenceOf[TokenHistory | None]
) -> mx.array:
    if all(history is None for history in histories):
        return logits
    known = [history or NO_HISTORY for history in histories]
    ids = _padded([history.ids for history in known], np.int32)
    counts = mx.array(_padded([history.generated for history in known], np.float32))
    repetition = _column(params, lambda p: p.repetition_penalty)
    frequency = _column(params, lambda p: p.frequency_penalty)
    presence = _column(params, lambda p: p.presence_penalty)
    places = mx.array(ids)
    seen = mx.take_along_axis(logits, places, axis=-1)
    seen = mx.where(seen > 0, seen / repetition, seen * repetition)
    seen = seen - frequency * counts - presence * (counts > 0)
    return mx.put_along_axis(logits, places, seen, axis=-1)


def _bias(logits: mx.array, params: SequenceOf[SamplingParams]) -> mx.array:
    if not any(p.logit_bias for p in params):
        return logits
    # A row without biases gets a bias of 0 for token 0.
    biases = [p.logit_bias or ((0, 0.0),) for p in params]
    places = mx.array(_padded([[token for token, _ in row] for row in biases], np.int32))
    amounts = mx.array(_padded([[amount for _, amount in row] for row in biases], np.float32))
    changed = mx.take_along_axis(logits, places, axis=-1) + amounts
    return mx.put_along_axis(logits, places, changed, axis=-1)


def _padded(
    rows: SequenceOf[SequenceOf[float] | np.ndarray], dtype: type[np.generic]
) -> np.ndarray:
    """Pad rows to the longest row by repeating each row's first entry, which changes no result."""
    longest = max(len(row) for row in rows)
    table: np.ndarray = np.empty((len(rows), longest), dtype)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
        target[len(row) :] = row[0]
    return table


def _column(
    params: SequenceOf[SamplingParams], value: Callable[[SamplingParams], float]
) -> mx.array:
    return mx.array([value(p) for p in params], dtype=mx.float32)[:, None]


def _choices(params: SequenceOf[SamplingParams], vocab: int) -> mx.array:
    """Return each row's four parameters for ``choose_tokens``, as an array ``[R, 4]``."""
    rows = [(p.temperature, min(p.top_k, vocab), p.top_p, p.min_p) for p in params]
    return mx.array(rows, dtype=mx.float32)


def _choose(logits: mx.array, params: SequenceOf[SamplingParams], keys: mx.array) -> mx.array:
    """Return token ids ``[R]``."""
    likeliest = mx.argmax(logits, axis=-1)
    greedy = [p.greedy for p in params]
    if all(greedy):
        return likeliest
    return mx.where(mx.array(greedy), likeliest, _draw(logits, params, keys))


def _draw(logits: mx.array, params: SequenceOf[SamplingParams], keys: mx.array) -> mx.array:
    """Draw a token id per row, among those that pass its filters: the one with the largest sum of
    its logit, divided by the temperature, and its noise."""
    scale = mx.minimum(1 / _column(params, lambda p: p.temperature), mx.finfo(mx.float32).max)
    scores = (logits - logits.max(axis=-1, keepdims=True)) * scale
    probabilities = mx.softmax(scores, axis=-1)
    floor = _floor(probabilities, params)
    if floor is not None:
        scores = mx.where(probabilities >= floor, scores, -mx.inf)
    return mx.argmax(scores + noise(keys, logits.shape[-1]), axis=-1)


def _floor(probabilities: mx.array, params: SequenceOf[SamplingParams]) -> mx.array | None:
    """Return the least probability ``[R, 1]`` that passes each row's filters, or None if no row
    has a filter."""
    vocab = probabilities.shape[-1]
    floors: list[mx.array] = []
    if any(p.min_p > 0 for p in params):
        floors.append(_column(params, lambda p: p.min_p) * probabilities.max(-1, keepdims=True))
    kept = [1 if p.greedy else p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    if min(kept) < vocab or any(p.top_p < 1 for p in params):
        # To sort a large vocabulary is slow. If all rows have a top_k, sort only the likeliest.
        best = mx.topk(probabilities, max(kept), axis=-1) if max(kept) < vocab else probabilities
        descending = -mx.sort(-best, axis=-1)
        last = mx.array(kept)[:, None] - 1
        inside = mx.arange(descending.shape[-1])[None] <= last
        descending = mx.where(inside, descending, 0)
        before = mx.cumsum(descending, axis=-1) - descending
        top_p = _column(params, lambda p: p.top_p)
        share = top_p * descending.sum(axis=-1, keepdims=True)
        # In a row without top_p, a rounding error in the sums must not remove a token.
        nucleus = inside & ((before < share) | (top_p >= 1))
        floors.append(mx.where(nucleus, descending, 2.0).min(axis=-1, keepdims=True))
    if not floors:
        return None
    return floors[0] if len(floors) == 1 else mx.maximum(*floors)


def pool(states: mx.array) -> PendingSamples:
    """Scale each state ``[R, hidden]`` to a float32 vector of length 1."""
    wide = states.astype(mx.float32)
    lengths = mx.sqrt(mx.square(wide).sum(axis=-1, keepdims=True))
    vectors = wide / lengths

    def read() -> list[Vector | RowError]:
        values = np.array(vectors)
        # One non-finite number makes the sum of its row non-finite.
        good = np.isfinite(values.sum(axis=-1))
        return [
            Vector(vector) if ok else NOT_FINITE for vector, ok in zip(values, good, strict=True)
        ]

    return PendingSamples([vectors], read)


# Scoring keeps this many rows of logits in memory: 20 MB for a vocabulary of 150,000.
SCORED_ROWS_AT_ONCE = 32

Head = Callable[[mx.array], mx.array]
"""A function that returns the logits ``[R, vocab]`` of states ``[R, hidden]``."""


def scored_rows(entries: SequenceOf[PlanEntry]) -> list[int]:
    """Return the index of the token before each scored token, in the step's flat token array."""
    rows: list[int] = []
    first = 0
    for entry in entries:
        if entry.scoring is not None:
            start = first + entry.scoring.start - entry.start
            rows += range(start, start + len(entry.scoring.next_tokens))
        first += entry.count
    return rows


def score(head: Head, states: mx.array, entries: SequenceOf[PlanEntry]) -> list[Scores | RowError]:
    """Return the scores of each entry that has a Scoring. ``states`` has a row per scored token."""
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
    """Merge samples and scores into one outcome for each entry that samples or scores, in order."""
    samples, scores = iter(sampled), iter(scored)
    outcomes: list[Outcome] = []
    for entry in entries:
        then: Outcome | None = next(samples) if entry.sampling is not None else None
        if entry.drafts:
            rows: list[Any] = [then, *islice(samples, entry.drafts)]
            then = Verified.of(entry.draft_tokens, rows)
        row_scores = next(scores) if entry.scoring is not None else None
        if isinstance(row_scores, Scores) and isinstance(then, Token | RowError):
            row_scores = row_scores._replace(then=then)
        outcome = then if row_scores is None else row_scores
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def _score(logits: mx.array, tokens: list[int], num_tops: list[int]) -> list[TokenLogprobs | None]:
    """Return each row's scores, or None for a row whose logits are not finite."""
    raw = logits.astype(mx.float32)
    finite = mx.isfinite(raw.sum(axis=-1))
    logprobs = Logprobs.of(raw, mx.array(tokens), num_tops)
    assert logprobs is not None
    mx.eval(finite, *logprobs.arrays)
    good: list[bool] = finite.tolist()  # type: ignore[assignment]
    return [value if ok else None for value, ok in zip(logprobs.read(), good, strict=True)]


def _scores(scores: list[TokenLogprobs | None]) -> Scores | RowError:
    finite = tuple(value for value in scores if value is not None)
    return Scores(finite) if len(finite) == len(scores) else NOT_FINITE
