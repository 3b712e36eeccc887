"""Samples token ids from logits: one row per sequence, each with its own parameters.

Every operation works on rows alone, and a request's draws are a function of its seed and of how
many tokens it has generated: what a row gets does not depend on who shares the batch.
"""

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.logprobs import Logprobs
from engine.step_plan import (
    NOT_FINITE,
    Masks,
    Outcome,
    RowError,
    Sampling,
    SamplingState,
    Token,
    TokenHistory,
)
from engine.types import SamplingParams
from metal_ext import CpuWorkers, choose_tokens

# Drawn numbers have 24 bits: all that a float32 in [0, 1) can tell apart.
DRAW_BITS = 24
# What is added to eight logits for a byte of a mask, the lowest bit first.
ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), 0, -np.inf)
ADDED = ADDED[:, ::-1].astype(np.float32)
# Of a row without penalties: its one token is changed by nothing.
NO_HISTORY = TokenHistory(np.zeros(1, np.int32), np.zeros(1, np.float32))


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Arrays that are still to be evaluated, and how to read them afterwards."""

    arrays: list[mx.array]
    read: Callable[[], SequenceOf[Outcome]]


def sample(
    logits: mx.array,
    rows: SequenceOf[Sampling],
    state: SamplingState | None = None,
    workers: CpuWorkers | None = None,
) -> PendingSamples:
    """Choose the next token of each row; their ids are the first of the arrays.

    logits: ``[R, vocab]``, any float type. state: None where no row needs one. workers: those of
    the CPU where the model runs on one; they choose in one operation.
    """
    masks, histories = (None, [None] * len(rows)) if state is None else state
    raw = logits.astype(mx.float32)
    params = [row.params for row in rows]
    num_generated = [row.num_generated for row in rows]
    adjusted = _adjust(raw, params, histories)
    if masks is not None:
        adjusted = _mask(adjusted, masks)
    if workers is None:
        ids = _choose(adjusted, params, num_generated)
        if masks is not None:
            ids = _allowed(adjusted, ids)
        # One non-finite number makes the sum non-finite.
        finite = mx.isfinite(raw.sum(axis=-1))
    else:
        choices = _choices(params, num_generated, raw.shape[-1])
        ids, finite = choose_tokens(raw, adjusted, choices, workers)
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
    """Return what came of a row: that it was not finite is the worst fault."""
    if not is_finite:
        return NOT_FINITE
    return token if why_broken is None else RowError(why_broken)


def draw(seed: int, index: int) -> float:
    """Return the number in [0, 1) that decides generated token ``index`` of a request with this
    seed."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - DRAW_BITS)) * 2.0**-DRAW_BITS


# --- what changes the logits -------------------------------------------------------------------


def _adjust(
    logits: mx.array,
    params: SequenceOf[SamplingParams],
    histories: SequenceOf[TokenHistory | None],
) -> mx.array:
    """Apply penalties and biases to the rows that have any."""
    changing = [i for i, p in enumerate(params) if p.changes_logits]
    if not changing:
        return logits
    where = mx.array(changing)
    changed = logits[where]
    its = [params[i] for i in changing]
    changed = _bias(_penalise(changed, its, [histories[i] for i in changing]), its)
    if len(changing) == len(params):
        return changed
    result = logits * 1
    result[where] = changed
    return result


def _mask(logits: mx.array, masks: Masks) -> mx.array:
    """Return the logits ``[R, vocab]`` with minus infinity where a token is not allowed."""
    rows, vocab = logits.shape
    # Adding eight numbers of a table for each byte takes a third of what choosing takes.
    added = mx.array(ADDED)[mx.array(masks.words.view(np.uint8))].reshape(rows, -1)
    return logits + (added if added.shape[1] == vocab else added[:, :vocab])


def _penalise(
    logits: mx.array,
    params: SequenceOf[SamplingParams],
    histories: SequenceOf[TokenHistory | None],
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
    # A row without biases gets one of zero.
    biases = [p.logit_bias or ((0, 0.0),) for p in params]
    places = mx.array(_padded([[token for token, _ in row] for row in biases], np.int32))
    amounts = mx.array(_padded([[amount for _, amount in row] for row in biases], np.float32))
    changed = mx.take_along_axis(logits, places, axis=-1) + amounts
    return mx.put_along_axis(logits, places, changed, axis=-1)


def _padded(
    rows: SequenceOf[SequenceOf[float] | np.ndarray], dtype: type[np.generic]
) -> np.ndarray:
    """Return rows of one length: shorter ones repeat their first entry, which changes nothing."""
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


# --- what chooses ------------------------------------------------------------------------------


def _choices(params: SequenceOf[SamplingParams], indices: SequenceOf[int], vocab: int) -> mx.array:
    """Return what ``choose_tokens`` is given for each row, ``[R, 5]``."""
    rows = [
        (
            p.temperature,
            min(p.top_k, vocab),
            p.top_p,
            p.min_p,
            0.0 if p.greedy else draw(p.seed, index),
        )
        for p, index in zip(params, indices, strict=True)
    ]
    return mx.array(rows, dtype=mx.float32)


def _choose(
    logits: mx.array, params: SequenceOf[SamplingParams], indices: SequenceOf[int]
) -> mx.array:
    """Return token ids ``[R]``. indices: how many tokens each row has generated before."""
    likeliest = mx.argmax(logits, axis=-1)
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if not rows:
        return likeliest
    where = mx.array(rows)
    drawing = [params[i] for i in rows]
    draws = mx.array([draw(params[i].seed, indices[i]) for i in rows], dtype=mx.float32)
    drawn = _draw(logits[where], drawing, draws)
    if len(rows) == len(params):
        return drawn
    result = likeliest * 1
    result[where] = drawn
    return result


def _allowed(logits: mx.array, ids: mx.array) -> mx.array:
    """Return the ids, with the likeliest one where one is forbidden: sums are rounded, and a draw
    may come to lie on a token without probability."""
    chosen = mx.take_along_axis(logits, ids[:, None].astype(mx.int32), axis=-1)[:, 0]
    return mx.where(chosen == -mx.inf, mx.argmax(logits, axis=-1), ids)


def _draw(logits: mx.array, params: SequenceOf[SamplingParams], draws: mx.array) -> mx.array:
    """Draw token ids ``[R]``: invert the cumulative distribution of what the filters leave."""
    probabilities = mx.softmax(logits / _column(params, lambda p: p.temperature), axis=-1)
    floor = _floor(probabilities, params)
    if floor is not None:
        probabilities = mx.where(probabilities >= floor, probabilities, 0)
    cumulative = mx.cumsum(probabilities, axis=-1)
    target = draws[:, None] * cumulative[:, -1:]
    return mx.minimum((cumulative <= target).sum(axis=-1), logits.shape[-1] - 1)


def _floor(probabilities: mx.array, params: SequenceOf[SamplingParams]) -> mx.array | None:
    """Return the probability ``[R, 1]`` below which a token is out; None where nothing is
    filtered."""
    vocab = probabilities.shape[-1]
    floors: list[mx.array] = []
    if any(p.min_p > 0 for p in params):
        floors.append(_column(params, lambda p: p.min_p) * probabilities.max(-1, keepdims=True))
    kept = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    if min(kept) < vocab or any(p.top_p < 1 for p in params):
        # Sorting all of a large vocabulary is slow: the largest top_k is enough where all have one.
        best = mx.topk(probabilities, max(kept), axis=-1) if max(kept) < vocab else probabilities
        descending = -mx.sort(-best, axis=-1)
        last = mx.array(kept)[:, None] - 1
        inside = mx.arange(descending.shape[-1])[None] <= last
        descending = mx.where(inside, descending, 0)
        before = mx.cumsum(descending, axis=-1) - descending
        top_p = _column(params, lambda p: p.top_p)
        share = top_p * descending.sum(axis=-1, keepdims=True)
        # Sums are rounded: a row without top_p keeps its tail whoever shares the batch.
        nucleus = inside & ((before < share) | (top_p >= 1))
        floors.append(mx.where(nucleus, descending, 2.0).min(axis=-1, keepdims=True))
    if not floors:
        return None
    return floors[0] if len(floors) == 1 else mx.maximum(*floors)
