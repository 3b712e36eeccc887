"""One layer's K and V behind address ranges, and in float64 what attention over them must be."""

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metal_ext import AddressRange, CpuWorkers, Heap, Layer, RowTable, Softmax, append
from tests.metal_ext.shapes import PAGE, Shape, bytes_at, whole_block_tokens

DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}
REGIONS = 4
KEY_REGION, VALUE_REGION = 2, 1  # the other two are another layer's

Floats = NDArray[np.float64]


def normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Random numbers of that dtype."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exact(x: mx.array) -> Floats:
    """The same numbers, wide enough to compute with."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def same_bits(one: mx.array, other: mx.array) -> bool:
    """Whether nothing at all differs."""
    kind = {2: mx.uint16, 4: mx.uint32}[one.dtype.size]
    return one.dtype == other.dtype and bool(mx.array_equal(one.view(kind), other.view(kind)))


class PagedLayer:
    """Sequences whose blocks lie mixed in one heap; all that has memory is zero at first."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        kv_heads: int = 2,
        head_dim: int = 32,
        dtype: mx.Dtype = mx.float32,
        workers: CpuWorkers | None = None,
        page_bytes: int = PAGE,
    ) -> None:
        """lengths: tokens that each sequence has memory for, at least."""
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.lengths = tuple(lengths)
        self.workers = workers or CpuWorkers(1)
        self.layer = Layer(KEY_REGION, VALUE_REGION, dtype)
        self.token = mx.zeros((1,))
        self.row_bytes = kv_heads * head_dim * dtype.size
        tokens = whole_block_tokens(self.row_bytes, page_bytes)
        blocks = [-(-length // tokens) for length in lengths]
        self.shape = Shape(
            page_bytes=page_bytes,
            tokens_per_block=tokens,
            blocks_per_heap=sum(blocks),
            blocks_per_range=max(blocks),
            rows=(self.row_bytes,) * REGIONS,
        )
        self.heap = Heap.shared(self.shape.geometry())
        self.ranges = [AddressRange.sparse(self.shape.geometry()) for _ in lengths]
        places = [(s, block) for s, count in enumerate(blocks) for block in range(count)]
        random.Random(0).shuffle(places)
        for number, (sequence, block) in enumerate(places):
            self.ranges[sequence].map(self.heap, number, block, 1, writable=True)

    def rows(self, *segments: tuple[int, int, int]) -> RowTable:
        """segments: (number of the sequence, start, count)."""
        return RowTable([(self.ranges[s], start, count) for s, start, count in segments])

    def newest(self) -> RowTable:
        """One row per sequence, its last."""
        return self.rows(*((s, length - 1, 1) for s, length in enumerate(self.lengths)))

    def append(self, keys: mx.array, values: mx.array, rows: RowTable) -> mx.array:
        """Queues the rows; the layer's token is the new one."""
        self.token = append(self.token, keys, values, rows, self.layer, self.workers)
        return self.token

    def fill(self) -> "PagedLayer":
        """Random K and V in all rows of all sequences: ``keys`` and ``values``, one sequence behind
        the other."""
        rows = self.rows(*((s, 0, length) for s, length in enumerate(self.lengths)))
        shape = (len(rows), self.kv_heads, self.head_dim)
        self.keys, self.values = normal(shape, self.dtype, 1), normal(shape, self.dtype, 2)
        mx.eval(self.append(self.keys, self.values, rows))
        return self

    def memory(self, sequence: int, region: int) -> NDArray[np.uint8]:
        """The bytes of a region as far as they are mapped, in place."""
        range_ = self.ranges[sequence]
        count = range_.mapped_tokens * self.row_bytes
        return bytes_at(range_.base_address + self.shape.offset(region, 0), count)

    def bits(self, sequence: int, region: int) -> NDArray[Any]:
        """The same as rows of numbers' bits: ``[tokens, kv_heads, head_dim]``, in place."""
        kind = np.uint16 if self.dtype == mx.bfloat16 else np.uint32
        return self.memory(sequence, region).view(kind).reshape(-1, self.kv_heads, self.head_dim)

    def numbers(self, sequence: int, region: int) -> Floats:
        """The same as numbers, copied."""
        shift = 16 if self.dtype == mx.bfloat16 else 0
        wide = self.bits(sequence, region).astype(np.uint32) << np.uint32(shift)
        return wide.view(np.float32).astype(np.float64)

    def snapshot(self) -> bytes:
        """Everything that has memory, to compare with later."""
        return b"".join(
            self.memory(sequence, region).tobytes()
            for sequence in range(len(self.ranges))
            for region in range(REGIONS)
        )

    def expected(self, sequence: int, position: int, query: Floats, softmax: Softmax) -> Floats:
        """softmax(query . keys * scale) . values over positions up to ``position``, in float64.

        query: ``[query_heads, head_dim]``.
        """
        group = len(query) // self.kv_heads
        seen = slice(max(0, position + 1 - (softmax.window or position + 1)), position + 1)
        keys, values = (
            np.repeat(self.numbers(sequence, region)[seen], group, axis=1)
            for region in (KEY_REGION, VALUE_REGION)
        )
        scores = np.einsum("hd,thd->ht", query, keys) * softmax.scale
        if softmax.softcap:
            scores = softmax.softcap * np.tanh(scores / softmax.softcap)
        if softmax.sinks is not None:
            scores = np.concatenate([scores, exact(softmax.sinks)[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(keys)]
        result: Floats = np.einsum("ht,thd->hd", weights, values)
        return result
