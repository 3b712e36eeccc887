"""RecallModel: a model whose answer is a hash of everything that it reads back from the cache.

At position p it writes (layer, K or V, p, token id) into K and V through the
real write path. The next token is a hash of all slots 0..p of all layers, read back as flat arrays
through the page map. ``recall`` computes the same answer without any cache, so that every
generated token checks mapping, recycling, preemption and isolation at once; and a slot that holds
something else is named before it is hashed.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from kvcache.layout import KVShape
from kvcache.views import KVViews

DIGIT_BASE = 128  # bfloat16 holds every whole number up to 256 exactly
DIGITS = 3
FIELDS = 2 + 2 * DIGITS  # layer, kind, position, token id
KINDS = ("keys", "values")


def recall(token_ids: Sequence[int], num_layers: int, vocab_size: int) -> int:
    """Return the token that follows these, without a cache."""
    digest = hashlib.sha256()
    for layer in range(num_layers):
        for kind in range(2):
            digest.update(_slots(layer, kind, np.arange(len(token_ids)), np.array(token_ids)))
    return int.from_bytes(digest.digest()[:8], "little") % vocab_size


def recall_many(prompt: Sequence[int], count: int, num_layers: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(recall(tokens, num_layers, vocab_size))
    return tokens[len(prompt) :]


def region_of(views: KVViews, layer: int, kind: str, number: int) -> mx.array:
    """Return the keys or values of a segment's whole past, itself included: ``[start + count,
    kv_heads, head_dim]``, read through the page map after the appends of the step."""
    regions = views._layers[layer]
    return views.rows[regions.group].region(views._order.newest[layer], regions, kind, number)


def positions_of(views: KVViews) -> np.ndarray:
    """Return the positions of a step's rows in their sequences."""
    return np.concatenate([its.start + np.arange(its.count) for its in views.segments])


def _slots(layer: int, kind: int, positions: np.ndarray, tokens: np.ndarray) -> bytes:
    """Return the content of a region's slots as whole numbers ``[n, FIELDS]`` int32."""
    columns = [np.full_like(positions, layer), np.full_like(positions, kind)]
    for values in (positions, tokens):
        columns += [values // DIGIT_BASE**d % DIGIT_BASE for d in range(DIGITS)]
    return np.stack(columns, axis=1).astype(np.int32).tobytes()


class WrongSlotError(AssertionError):
    """A slot of the cache holds numbers that were never written there."""


@dataclass
class RecallModel:
    """The fake. ``shape`` must give a row room for FIELDS numbers."""

    shape: KVShape
    vocab_size: int
    non_finite_tokens: frozenset[int] = frozenset()
    """Input tokens whose logits come out as NaN."""
    failing_tokens: frozenset[int] = frozenset()
    """Input tokens on which the forward raises."""

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        """Return logits: they stand for the states."""
        tokens, places = np.array(token_ids), positions_of(views)
        if self.failing_tokens & set(tokens.tolist()):
            raise RuntimeError("injected fault")
        for layer in range(len(self.shape.layers)):
            keys, values = (self._encode(layer, kind, places, tokens) for kind in range(2))
            views.append(layer, keys, keys, values, None)
        if rows is None:
            return None
        ends = list(accumulate(segment.count for segment in views.segments))
        logits = np.zeros((rows.size, self.vocab_size), np.float32)
        for out, row in enumerate(np.array(rows).tolist()):
            segment = bisect_right(ends, row)
            logits[out, self._recalled(views, segment, int(places[row]))] = 1.0
            if int(tokens[row]) in self.non_finite_tokens:
                logits[out] = np.nan
        return mx.array(logits)

    def head(self, states: mx.array) -> mx.array:
        return states

    def _encode(self, layer: int, kind: int, places: np.ndarray, tokens: np.ndarray) -> mx.array:
        slots = np.frombuffer(_slots(layer, kind, places, tokens), np.int32).reshape(-1, FIELDS)
        spec = self.shape.layers[layer]
        rows = np.zeros((len(places), spec.kv_heads * spec.head_dim), np.float32)
        rows[:, :FIELDS] = slots
        return mx.array(rows.reshape(-1, spec.kv_heads, spec.head_dim))

    def _recalled(self, views: KVViews, segment: int, position: int) -> int:
        """Return the hash of slots 0..position, read from the cache."""
        digest = hashlib.sha256()
        for layer in range(len(self.shape.layers)):
            for kind, name in enumerate(KINDS):
                region = region_of(views, layer, name, segment).astype(mx.float32)
                slots = np.array(region).reshape(region.shape[0], -1)[: position + 1, :FIELDS]
                self._check(slots, layer, kind)
                digest.update(slots.astype(np.int32).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") % self.vocab_size

    @staticmethod
    def _check(slots: np.ndarray, layer: int, kind: int) -> None:
        written = np.arange(len(slots))
        position = sum(slots[:, 2 + d] * DIGIT_BASE**d for d in range(DIGITS))
        wrong = (slots[:, 0] != layer) | (slots[:, 1] != kind) | (position != written)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise WrongSlotError(
                f"layer {layer} {KINDS[kind]} slot {place} holds {slots[place].tolist()}"
            )
