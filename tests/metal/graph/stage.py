"""Sequences in the memory of a MetalKVBackend, and what attention over them must be."""

import os
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

import mlx.core as mx

import metal_ext
from metal_ext import AddressRange, CopyCounter, Geometry, Heap, Layer, Mapper, MetalRows
from metal_ext import MetalKVBackend as KVBackend
from tests.metal.graph import _standin

KINDS = ("sparse", "paged", "dense")
PAGE = 16384
WAIT_S = 20.0
# How far from float32's result: half a unit in the last place of numbers below 4, and the sums.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}

# What the computer's objects do not answer, where a test wants an older one.
_standin.start(1, set(filter(None, os.environ.get("QUIRE_STANDIN_LACKS", "").split(";"))))
take_mistakes = _standin.take_mistakes


@dataclass(frozen=True)
class Shape:
    """A model's heads, and what they are kept and computed in."""

    kv_heads: int = 2
    query_heads: int = 6
    head_dim: int = 64
    layers: int = 2
    kept: mx.Dtype = mx.bfloat16
    computed: mx.Dtype = mx.float32
    blocks_per_range: int = 8

    @property
    def row_bytes(self) -> int:
        return self.kv_heads * self.head_dim * self.kept.size

    @property
    def block_tokens(self) -> int:
        """Of one page per region."""
        return PAGE // self.row_bytes

    def geometry(self, kind: str) -> Geometry:
        dense = kind == "dense"
        return Geometry(
            page_bytes=PAGE,
            tokens_per_block=self.block_tokens * (self.blocks_per_range if dense else 1),
            blocks_per_heap=1 if dense else 8,
            blocks_per_range=1 if dense else self.blocks_per_range,
            region_row_bytes=[self.row_bytes] * 2 * self.layers,
        )

    def numbers(self, rows: int, heads: int) -> mx.array:
        """Random: ``[rows, heads, head_dim]``, computed."""
        return mx.random.normal((rows, heads, self.head_dim)).astype(self.computed)


@dataclass(eq=False)
class Sequence:
    """A range, what stands behind it, and what its rows are, layer by layer."""

    range: AddressRange
    blocks: list[tuple[int, int]] = field(default_factory=list)  # heap and block of it
    borrowed: int = 0  # leading blocks that are another sequence's
    keys: list[mx.array] = field(default_factory=list)
    values: list[mx.array] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.keys[0]) if self.keys else 0


class Stage:
    """A backend with sequences that come, grow and go. Memory is reused as soon as it may be."""

    def __init__(
        self,
        kind: str,
        shape: Shape | None = None,
        *,
        heaps: int = 2,
        max_buffer_bytes: int = 0,
        timeout_s: float = WAIT_S,
    ) -> None:
        self.kind, self.shape = kind, shape or Shape()
        self.geometry = self.shape.geometry(kind)
        self.kv_backend = KVBackend(kind, self.geometry, 8, timeout_s, max_buffer_bytes)
        self.mapper, self.counter = Mapper(), CopyCounter()
        self.heaps: list[Heap] = []
        self.free: list[tuple[int, int]] = []
        self.idle: list[AddressRange] = []
        for _ in range(heaps):
            self.add_heap()
        self.tokens = [mx.zeros((1,)) for _ in range(self.shape.layers)]
        kept = self.shape.kept
        self.layers = [Layer(2 * n, 2 * n + 1, kept) for n in range(self.shape.layers)]
        self.worst = 0.0  # distance from what attention must be, of its tolerance

    @property
    def block_tokens(self) -> int:
        per_range = self.shape.block_tokens * self.shape.blocks_per_range
        return per_range if self.kind == "dense" else self.shape.block_tokens

    def add_heap(self) -> None:
        self.heaps.append(self.kv_backend.new_heap())
        count = 1 if self.kind == "dense" else 8
        self.free += [(len(self.heaps) - 1, block) for block in range(count)]

    def done(self, ticket: int) -> None:
        assert self.mapper.wait(ticket, WAIT_S)
        assert self.mapper.failure == ""
        assert not self.mapper.refused(ticket)

    def finish_mappings(self) -> None:
        self.done(self.kv_backend.finish_mappings(self.mapper))

    def open(self, tokens: int = 0) -> Sequence:
        sequence = Sequence(self.idle.pop() if self.idle else self.kv_backend.new_range())
        self.grow(sequence, tokens)
        return sequence

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Memory for so many tokens, of blocks that are free, one by one."""
        while len(sequence.blocks) * self.block_tokens < tokens:
            heap, block = self.free.pop(0)
            at = len(sequence.blocks)
            self.done(self.mapper.map(sequence.range, self.heaps[heap], block, at, 1, True))
            sequence.blocks.append((heap, block))
        self.finish_mappings()

    def borrow(self, lender: Sequence, blocks: int) -> Sequence:
        """A sequence that begins as another one does, in the same memory."""
        sequence = self.open()
        for at, (heap, block) in enumerate(lender.blocks[:blocks]):
            self.done(self.mapper.map(sequence.range, self.heaps[heap], block, at, 1, False))
        self.finish_mappings()
        tokens = blocks * self.block_tokens
        sequence.blocks, sequence.borrowed = lender.blocks[:blocks], blocks
        sequence.keys = [keys[:tokens] for keys in lender.keys]
        sequence.values = [values[:tokens] for values in lender.values]
        return sequence

    def copy_tail(self, lender: Sequence, sequence: Sequence) -> None:
        """The rows of the lender's partial block, copied behind what was borrowed."""
        at, rest = divmod(lender.tokens, self.block_tokens)
        self.grow(sequence, lender.tokens)
        copied = self.kv_backend.copy_block(
            self.mapper, lender.range, at, sequence.range, at, rest, self.counter
        )
        self.done(copied)
        sequence.keys, sequence.values = list(lender.keys), list(lender.values)

    def close(self, sequence: Sequence) -> None:
        """The sequence ends: its memory is anybody's when the last step that used it is done."""
        if sequence.blocks:
            self.done(self.mapper.unmap(sequence.range, 0, len(sequence.blocks)))
        self.free += sequence.blocks[sequence.borrowed :]
        self.idle.append(sequence.range)

    def rows(self, *parts: tuple[Sequence, int]) -> MetalRows:
        """The next rows of sequences: (sequence, count)."""
        return self.kv_backend.rows([(s.range, s.tokens, count) for s, count in parts])

    def append(self, rows: MetalRows, layer: int, keys: mx.array, values: mx.array) -> None:
        self.tokens[layer] = metal_ext.append(
            self.tokens[layer], keys, values, rows, self.layers[layer], self.kv_backend
        )

    def step(self, *parts: tuple[Sequence, int]) -> int:
        """Appends random rows and attends to them, in all layers, decoded rows first; returns the
        epoch when it is complete. ``worst`` says how far the results were off."""
        shape, rows = self.shape, self.rows(*parts)
        made: list[tuple[mx.array, mx.array, mx.array]] = []
        results = []
        for layer in range(shape.layers):
            keys, values = (shape.numbers(len(rows), shape.kv_heads) for _ in "kv")
            queries = shape.numbers(len(rows), shape.query_heads)
            self.append(rows, layer, keys, values)
            results.append(self.attend(rows, layer, parts, queries))
            made.append((queries, keys, values))
        mx.eval(metal_ext.step_end([*results, *self.tokens], rows, self.kv_backend), results)
        for layer, (result, (queries, keys, values)) in enumerate(zip(results, made, strict=True)):
            self.measure(result, self.expected(layer, parts, queries, keys, values))
        assert self.kv_backend.completed_epoch == rows.epoch
        return rows.epoch

    def attend(
        self,
        rows: MetalRows,
        layer: int,
        parts: Rows[tuple[Sequence, int]],
        queries: mx.array,
    ) -> mx.array:
        """As a model does: rows of their own in one call, chunks by MLX over what they can see."""
        decoded = next((i for i, (_, n) in enumerate(parts) if n > 1), len(parts))
        out = []
        if decoded:
            out.append(self.decode(rows, layer, 0, queries[:decoded]))
        start = decoded
        for number, (sequence, count) in enumerate(parts[decoded:], decoded):
            keys, values = self.past(rows, layer, number, sequence, count)
            out.append(self.chunk(queries[start : start + count], keys, values))
            start += count
        return mx.concatenate(out)

    def decode(
        self, rows: MetalRows, layer: int, first: int, queries: mx.array, **how: Any
    ) -> mx.array:
        """how: as for Softmax."""
        token, heads = self.tokens[layer], self.shape.kv_heads
        softmax = metal_ext.Softmax(self.shape.head_dim**-0.5, **how)
        return metal_ext.decode_attention(
            token, queries, rows, first, self.layers[layer], heads, softmax, self.kv_backend
        )

    def past(
        self, rows: MetalRows, layer: int, number: int, sequence: Sequence, count: int
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of a segment's range up to its last row, as one array each: a copy where
        nothing else is ordered behind the rows."""
        shape, tokens = self.shape, sequence.tokens + count
        token, heads = self.tokens[layer], (shape.kv_heads, shape.head_dim)
        if self.kind == "paged" or count == 1:
            return metal_ext.gather(
                token, rows, number, 0, tokens, self.layers[layer], *heads, self.kv_backend
            )
        keys, values = (
            metal_ext.region_view(
                token, sequence.range, region, tokens, *heads, shape.kept, self.kv_backend
            )
            for region in (2 * layer, 2 * layer + 1)
        )
        return keys, values

    def chunk(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """MLX's attention, which is a command of its own on the device."""
        return _standin.observed(attention(queries, keys, values), [queries, keys, values])

    def expected(
        self,
        layer: int,
        parts: Rows[tuple[Sequence, int]],
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
    ) -> mx.array:
        """What attention must be; from then on the sequences have the rows."""
        out, start = [], 0
        for sequence, count in parts:
            here = slice(start, start + count)
            for past, new in ((sequence.keys, keys), (sequence.values, values)):
                kept = new[here].astype(self.shape.kept)
                if len(past) == layer:
                    past.append(kept)
                else:
                    past[layer] = mx.concatenate([past[layer], kept])
            out.append(attention(queries[here], sequence.keys[layer], sequence.values[layer]))
            start += count
        return mx.concatenate(out)

    def measure(self, result: mx.array, expected: mx.array) -> None:
        distance = mx.abs(result.astype(mx.float32) - expected.astype(mx.float32)).max().item()
        assert isinstance(distance, float)
        # What is no number is as far off as can be, and stays so.
        off = inf if isnan(distance) else distance / TOLERANCE[result.dtype]
        self.worst = max(self.worst, off)

    def end(self) -> None:
        assert self.worst <= 1.0, "of the tolerance"
        assert self.kv_backend.shutdown()
        assert self.kv_backend.failure == ""


def attention(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention of the last rows of a sequence, ``[rows, heads, head_dim]`` each, by MLX in
    float32; of the queries' dtype."""
    heads_first = [x.astype(mx.float32).swapaxes(0, 1)[None] for x in (queries, keys, values)]
    scale = queries.shape[-1] ** -0.5
    out = mx.fast.scaled_dot_product_attention(*heads_first, scale=scale, mask="causal")
    return out[0].swapaxes(0, 1).astype(queries.dtype)
