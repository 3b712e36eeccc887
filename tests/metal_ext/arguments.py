"""Every argument of the native functions that is an integer or an array, and a program that calls
all of them with what they must refuse or bear."""

import ast
import errno
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType

import mlx.core as mx

import metal_ext
from metal_ext import (
    CopyCounter,
    CpuWorkers,
    GatedDelta,
    Heap,
    Layer,
    Mapper,
    PackedExperts,
    PackedLinear,
    RopeTable,
    RowTable,
    StateMemory,
    StateRows,
    append,
    block_copy,
    choose_tokens,
    chunk_attention,
    decode_attention,
    gated_delta,
    gated_mlp,
    linear,
    linear_heads,
    mixture_mlp,
    packed_bytes,
    packed_rows,
    project_append,
    region_view,
    rms_norm,
    rope_angles,
    uncounted,
)
from tests.metal_ext.deltas import DeltaLayer, DeltaShape, Slots
from tests.metal_ext.shapes import PAGE, Shape

STUB = Path(metal_ext.__file__).with_name("_ext.pyi")
# Of the stub: what only a build with Metal has; functions that take none of these types by name.
METAL_TYPES = {"MetalRows", "MetalKVBackend"}
METAL_FUNCTIONS = {"swiglu"}

# Rows of two heads of 32 float32.
SHAPE = Shape(tokens_per_block=PAGE // 256, rows=(256, 256))
MAPPED_BLOCKS = 4
MAPPED_TOKENS = MAPPED_BLOCKS * SHAPE.tokens_per_block
BLOCKS = SHAPE.blocks_per_range
OUTPUTS, INPUTS, VOCABULARY, EXPERTS = 64, 32, 100, 3
DELTA = DeltaLayer(DeltaShape(key_heads=1, value_heads=2, key_dim=16))
SLOT_BYTES = 4 * DELTA.shape.numbers

BEYOND = [-1, -(2**63), -(2**63) - 1, -(10**40)]
BEYOND += [2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**40]
HOSTILE = [0, 2**31 - 1, 2**32 + 64, *BEYOND]

# A process of so many addresses is refused what is absurd, instead of getting it.
MOST_ADDRESS_BYTES = 8 * 2**30
MOST_ACTIVE_BYTES = 2**30
MOST_NUMBERS = 2**24
REFUSED = (IndexError, ValueError, TypeError, OverflowError)
# What the stub documents as a RuntimeError, with numbers inside of their intervals.
BUGS = ("is not completed", "is mapped already")


class Setting:
    """Everything valid, so that one argument at a time can be wrong."""

    def __init__(self) -> None:
        self.heap = Heap.shared(SHAPE.geometry())
        self.range = SHAPE.mapped(MAPPED_BLOCKS, self.heap)
        self.mapper = Mapper()
        self.workers = CpuWorkers(1)
        self.rows = RowTable([(self.range, 0, 2), (self.range, 2, 1)])
        self.two_rows = RowTable([(self.range, 0, 2)])
        self.layer = Layer(0, 1, mx.float32)
        self.token = mx.zeros((1,))
        self.heads = mx.zeros((2, 2, 32))
        self.weight = mx.ones((32,))
        self.packed = PackedLinear([mx.ones((OUTPUTS, INPUTS))], self.workers, [])
        self.down = PackedLinear([mx.ones((INPUTS, OUTPUTS // 2))], self.workers, [])
        self.router = PackedLinear([mx.ones((EXPERTS, INPUTS))], self.workers, [])
        both, back = mx.ones((EXPERTS, OUTPUTS, INPUTS)), mx.ones((EXPERTS, INPUTS, OUTPUTS // 2))
        self.experts = PackedExperts([both], self.workers, [])
        self.experts_down = PackedExperts([back], self.workers, [])
        self.x = mx.ones((2, INPUTS))
        self.words, self.scales, self.biases = mx.quantize(mx.ones((OUTPUTS, INPUTS)), 32, 4)
        self.logits = mx.zeros((2, VOCABULARY))
        self.choices = mx.array([[1.0, 0, 1, 0, 0.5]] * 2)
        self.slots = Slots(DELTA.shape, count=1, offset=0)

    def map(self, heap_block: int = 0, block: int = 4, count: int = 1) -> None:
        self.range.map(self.heap, heap_block, block, count, writable=True)

    def attend(
        self,
        first_row: int = 0,
        kv_heads: int = 2,
        layer: Layer | None = None,
        queries: mx.array | None = None,
        token: mx.array | None = None,
    ) -> mx.array:
        return decode_attention(
            self.token if token is None else token,
            self.heads if queries is None else queries,
            self.rows,
            first_row,
            layer or self.layer,
            kv_heads,
            1.0,
            self.workers,
        )

    def attend_chunk(
        self,
        segment: int = 0,
        kv_heads: int = 2,
        queries: mx.array | None = None,
        token: mx.array | None = None,
    ) -> mx.array:
        return chunk_attention(
            self.token if token is None else token,
            self.heads if queries is None else queries,
            self.rows,
            segment,
            self.layer,
            kv_heads,
            1.0,
            self.workers,
        )

    def write(self, layer: Layer | None = None, **arrays: mx.array) -> mx.array:
        given = {"token": self.token, "keys": self.heads, "values": self.heads} | arrays
        return append(**given, rows=self.two_rows, layer=layer or self.layer, workers=self.workers)

    def project(
        self,
        layer: Layer | None = None,
        q_weight: mx.array | None = None,
        k_weight: mx.array | None = None,
        **arrays: mx.array,
    ) -> tuple[mx.array, mx.array]:
        one, other = (self.weight if x is None else x for x in (q_weight, k_weight))
        given = {
            "token": self.token,
            "queries": self.heads,
            "keys": self.heads,
            "values": self.heads,
            "angles": rope_angles(self.two_rows, RopeTable([1.0] * 16), self.workers),
        }
        return project_append(
            **(given | arrays),
            norms=(one, other, 1e-6),
            rows=self.two_rows,
            layer=layer or self.layer,
            workers=self.workers,
        )

    def view(
        self,
        region: int = 0,
        tokens: int = 1,
        kv_heads: int = 2,
        head_dim: int = 32,
        token: mx.array | None = None,
    ) -> mx.array:
        return region_view(
            self.token if token is None else token,
            self.range,
            region,
            tokens,
            kv_heads,
            head_dim,
            mx.float32,
        )

    def copy(
        self,
        source_block: int = 0,
        target_block: int = 1,
        tokens: int = 1,
        token: mx.array | None = None,
    ) -> mx.array:
        return block_copy(
            self.token if token is None else token,
            self.range,
            source_block,
            self.range,
            target_block,
            tokens,
            CopyCounter(),
        )

    def pack(
        self,
        bits: int = 4,
        group: int = 32,
        words: mx.array | None = None,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
    ) -> PackedLinear:
        codes = (
            self.scales if scales is None else scales,
            self.biases if biases is None else biases,
            bits,
            group,
        )
        return PackedLinear([self.words if words is None else words], self.workers, [codes])

    def multiply(self, **arrays: mx.array) -> mx.array:
        given = {"x": self.x, "norm": mx.ones((INPUTS,)), "residual": mx.ones((2, OUTPUTS))}
        return linear(packed=self.packed, workers=self.workers, eps=1e-6, **(given | arrays))

    def multiply_heads(
        self, heads: Sequence[int] = (2, 1, 1), **arrays: mx.array
    ) -> list[mx.array]:
        given = {"x": self.x, "norm": mx.ones((INPUTS,)), "residual": mx.ones((2, OUTPUTS))}
        return linear_heads(
            packed=self.packed, workers=self.workers, heads=heads, eps=1e-6, **(given | arrays)
        )

    def states(
        self, count: int = 2, read: int = 0, rows: int = 1, write: int | EllipsisType = ...
    ) -> StateRows:
        slot = self.slots.address(0)
        on_the_way = [(rows, slot)] if count == 2 else []
        last = slot if isinstance(write, EllipsisType) else write
        return StateRows([(count, read, [*on_the_way, (count, last)])], [self.slots.memory])

    def recur(self, offset: int = 0, **arrays: mx.array) -> tuple[mx.array, mx.array]:
        inputs = DELTA.inputs(2)
        given = {name: mx.array(getattr(inputs, name)) for name in ("qkv", "z", "a", "b")}
        return gated_delta(
            **({"token": self.token} | given | arrays),
            delta=DELTA.native,
            rows=self.states(),
            offset=offset,
            workers=self.workers,
        )

    def delta(self, **changes: int | mx.array) -> GatedDelta:
        return GatedDelta(**(DELTA.arguments | changes))

    def pack_experts(
        self,
        bits: int = 4,
        group: int = 32,
        words: mx.array | None = None,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
    ) -> PackedExperts:
        stack = [mx.stack([its] * EXPERTS) for its in (self.words, self.scales, self.biases)]
        codes = (
            stack[1] if scales is None else scales,
            stack[2] if biases is None else biases,
            bits,
            group,
        )
        return PackedExperts([stack[0] if words is None else words], self.workers, [codes])

    def mix(
        self, chosen: int = 2, x: mx.array | None = None, norm: mx.array | None = None
    ) -> mx.array:
        return mixture_mlp(
            self.x if x is None else x,
            self.weight if norm is None else norm,
            1e-6,
            self.router,
            self.experts,
            self.experts_down,
            chosen,
            True,
            None,
            self.workers,
        )

    def choose(self, **arrays: mx.array) -> tuple[mx.array, mx.array]:
        given = {"raw": self.logits, "adjusted": self.logits + 1, "choices": self.choices}
        return choose_tokens(**(given | arrays), workers=self.workers)


# --- integers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """An integer argument: its name in an error, its interval, a call that only it can spoil."""

    name: str
    lowest: int
    highest: int
    call: Callable[[Setting, int], object]

    def numbers_outside(self) -> list[int]:
        beyond = [n for n in BEYOND if not self.lowest <= n <= self.highest]
        return [self.lowest - 1, self.highest + 1, *beyond]


# By the stub's names; behind "by", which function looks at what a layer or a table was made with.
INTERVALS = {
    "packed_bytes.inputs": Argument(
        "inputs", 1, 2**31 - 1, lambda s, n: packed_bytes(n, [(1, mx.float32, 0, 0)])
    ),
    "packed_bytes.matrices.0": Argument(
        "outputs", 1, 2**31 - 1, lambda s, n: packed_bytes(1, [(n, mx.float32, 0, 0)])
    ),
    "Geometry.page_bytes": Argument(
        "page_bytes", 1, 2**36, lambda s, n: SHAPE.geometry(page_bytes=n)
    ),
    "Geometry.tokens_per_block": Argument(
        "tokens_per_block", 1, 2**24, lambda s, n: SHAPE.geometry(tokens_per_block=n)
    ),
    "Geometry.blocks_per_heap": Argument(
        "blocks_per_heap", 1, 2**24, lambda s, n: SHAPE.geometry(blocks_per_heap=n)
    ),
    "Geometry.blocks_per_range": Argument(
        "blocks_per_range", 1, 2**24, lambda s, n: SHAPE.geometry(blocks_per_range=n)
    ),
    "Geometry.region_row_bytes": Argument(
        "row_bytes", 1, 2**20, lambda s, n: SHAPE.geometry(rows=(256, n))
    ),
    "AddressRange.map.heap_block": Argument(
        "heap blocks", 0, BLOCKS - 1, lambda s, n: s.map(heap_block=n)
    ),
    "AddressRange.map.block": Argument("range blocks", 0, BLOCKS - 1, lambda s, n: s.map(block=n)),
    "AddressRange.map.count": Argument("range blocks", 1, BLOCKS - 4, lambda s, n: s.map(count=n)),
    "Mapper.map.heap_block": Argument(
        "heap blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.map(s.range, s.heap, n, 4, 1, True)
    ),
    "Mapper.map.block": Argument(
        "range blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.map(s.range, s.heap, 0, n, 1, True)
    ),
    "Mapper.map.count": Argument(
        "range blocks", 1, BLOCKS - 4, lambda s, n: s.mapper.map(s.range, s.heap, 0, 4, n, True)
    ),
    "Mapper.refused.ticket": Argument("ticket", 1, 2**63 - 2, lambda s, n: s.mapper.refused(n)),
    "Mapper.unmap.block": Argument(
        "range blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.unmap(s.range, n, 1)
    ),
    "Mapper.unmap.count": Argument(
        "range blocks", 1, BLOCKS, lambda s, n: s.mapper.unmap(s.range, 0, n)
    ),
    "Mapper.release.block": Argument(
        "heap blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.release(s.heap, n, 1)
    ),
    "Mapper.release.count": Argument(
        "heap blocks", 1, BLOCKS, lambda s, n: s.mapper.release(s.heap, 0, n)
    ),
    "Mapper.wait.ticket": Argument("ticket", 0, 2**63 - 2, lambda s, n: s.mapper.wait(n, 0.0)),
    "CpuWorkers.threads": Argument("threads", 1, 256, lambda s, n: CpuWorkers(n)),
    "RowTable.segments.1": Argument(
        "segment of mapped tokens", 0, MAPPED_TOKENS - 1, lambda s, n: RowTable([(s.range, n, 1)])
    ),
    "RowTable.segments.2": Argument(
        "segment of mapped tokens", 1, MAPPED_TOKENS, lambda s, n: RowTable([(s.range, 0, n)])
    ),
    "Layer.key_region by append": Argument(
        "key_region", 0, 1, lambda s, n: s.write(Layer(n, 1, mx.float32))
    ),
    "Layer.value_region by append": Argument(
        "value_region", 0, 1, lambda s, n: s.write(Layer(0, n, mx.float32))
    ),
    "decode_attention.first_row": Argument(
        "rows of the table", 0, 1, lambda s, n: s.attend(first_row=n)
    ),
    "decode_attention.kv_heads": Argument("kv_heads", 1, 2, lambda s, n: s.attend(kv_heads=n)),
    "Layer.key_region by decode_attention": Argument(
        "key_region", 0, 1, lambda s, n: s.attend(layer=Layer(n, 1, mx.float32))
    ),
    "Layer.value_region by decode_attention": Argument(
        "value_region", 0, 1, lambda s, n: s.attend(layer=Layer(0, n, mx.float32))
    ),
    "chunk_attention.segment": Argument(
        "segments of the table", 0, 1, lambda s, n: s.attend_chunk(segment=n)
    ),
    "chunk_attention.kv_heads": Argument("kv_heads", 1, 2, lambda s, n: s.attend_chunk(kv_heads=n)),
    "region_view.region": Argument("region", 0, 1, lambda s, n: s.view(region=n)),
    "region_view.tokens": Argument("tokens", 1, MAPPED_TOKENS, lambda s, n: s.view(tokens=n)),
    "region_view.kv_heads": Argument("kv_heads", 1, 256, lambda s, n: s.view(kv_heads=n)),
    "region_view.head_dim": Argument("head_dim", 1, 256, lambda s, n: s.view(head_dim=n)),
    "block_copy.source_block": Argument(
        "source blocks", 0, MAPPED_BLOCKS - 1, lambda s, n: s.copy(source_block=n)
    ),
    "block_copy.target_block": Argument(
        "target blocks", 0, MAPPED_BLOCKS - 1, lambda s, n: s.copy(target_block=n)
    ),
    "block_copy.tokens": Argument(
        "tokens", 1, SHAPE.tokens_per_block, lambda s, n: s.copy(tokens=n)
    ),
    "linear_heads.heads": Argument("heads", 1, OUTPUTS, lambda s, n: s.multiply_heads((n,))),
    "mixture_mlp.chosen": Argument("chosen", 1, EXPERTS, lambda s, n: s.mix(n)),
    "Layer.key_region by project_append": Argument(
        "key_region", 0, 1, lambda s, n: s.project(Layer(n, 1, mx.float32))
    ),
    "Layer.value_region by project_append": Argument(
        "value_region", 0, 1, lambda s, n: s.project(Layer(0, n, mx.float32))
    ),
    "StateMemory.bytes": Argument("bytes", 1, 2**46, lambda s, n: StateMemory(n)),
    "StateMemory.release.offset": Argument(
        "bytes of the memory", 0, 0, lambda s, n: s.slots.memory.release(n, PAGE)
    ),
    "StateMemory.release.bytes": Argument(
        "bytes of the memory", 1, PAGE, lambda s, n: s.slots.memory.release(0, n)
    ),
    "StateMemory.committed.offset": Argument(
        "bytes of the memory", 0, 0, lambda s, n: s.slots.memory.committed(n, PAGE)
    ),
    "StateMemory.committed.bytes": Argument(
        "bytes of the memory", 1, PAGE, lambda s, n: s.slots.memory.committed(0, n)
    ),
    "StateRows.segments.0": Argument("count", 1, 2**24, lambda s, n: s.states(count=n)),
    # Right ones are where memory happens to lie; 0 is none.
    "StateRows.segments.1": Argument("address", 2, 3, lambda s, n: s.states(read=n)),
    "StateRows.segments.2.0": Argument("rows", 1, 1, lambda s, n: s.states(rows=n)),
    "StateRows.segments.2.1": Argument("address", 1, 3, lambda s, n: s.states(write=n)),
    "GatedDelta.key_heads": Argument("key_heads", 1, 2, lambda s, n: s.delta(key_heads=n)),
    "GatedDelta.value_heads": Argument("value_heads", 1, 256, lambda s, n: s.delta(value_heads=n)),
    "GatedDelta.key_dim": Argument("key_dim", 16, 256, lambda s, n: s.delta(key_dim=n)),
    "GatedDelta.value_dim": Argument("value_dim", 16, 256, lambda s, n: s.delta(value_dim=n)),
    "gated_delta.offset": Argument(
        "bytes of a slot", 0, PAGE - SLOT_BYTES, lambda s, n: s.recur(offset=n)
    ),
}
# Integers of which few are right: others are a ValueError.
CHOICES: dict[str, Callable[[Setting, int], object]] = {
    "PackedLinear.codes.2": lambda s, n: s.pack(bits=n),
    "PackedLinear.codes.3": lambda s, n: s.pack(group=n),
    "PackedExperts.codes.2": lambda s, n: s.pack_experts(bits=n),
    "PackedExperts.codes.3": lambda s, n: s.pack_experts(group=n),
    "packed_bytes.matrices.2": lambda s, n: packed_bytes(128, [(1, mx.float32, n, 32)]),
    "packed_bytes.matrices.3": lambda s, n: packed_bytes(128, [(1, mx.float32, 4, n)]),
}
INTEGERS = {name: argument.call for name, argument in INTERVALS.items()} | CHOICES


# --- arrays --------------------------------------------------------------------------------------

Arrays = Callable[[Setting, mx.array], object]
ARRAYS: dict[str, Arrays] = {
    "append.token": lambda s, x: s.write(token=x),
    "append.keys": lambda s, x: s.write(keys=x, values=x),
    "append.values": lambda s, x: s.write(values=x),
    "decode_attention.token": lambda s, x: s.attend(token=x),
    "decode_attention.queries": lambda s, x: s.attend(queries=x),
    "chunk_attention.token": lambda s, x: s.attend_chunk(token=x),
    "chunk_attention.queries": lambda s, x: s.attend_chunk(queries=x),
    "region_view.token": lambda s, x: s.view(token=x),
    "block_copy.token": lambda s, x: s.copy(token=x),
    "project_append.token": lambda s, x: s.project(token=x),
    "project_append.queries": lambda s, x: s.project(queries=x),
    "project_append.keys": lambda s, x: s.project(keys=x, values=x),
    "project_append.values": lambda s, x: s.project(values=x),
    "project_append.norms.0": lambda s, x: s.project(q_weight=x),
    "project_append.norms.1": lambda s, x: s.project(k_weight=x),
    "project_append.angles": lambda s, x: s.project(angles=x),
    "PackedLinear.weights": lambda s, x: PackedLinear([x], s.workers, []),
    "PackedLinear.weights by codes": lambda s, x: s.pack(words=x),
    "PackedLinear.codes.0": lambda s, x: s.pack(scales=x),
    "PackedLinear.codes.1": lambda s, x: s.pack(biases=x),
    "PackedExperts.weights": lambda s, x: PackedExperts([x], s.workers, []),
    "PackedExperts.weights by codes": lambda s, x: s.pack_experts(words=x),
    "PackedExperts.codes.0": lambda s, x: s.pack_experts(scales=x),
    "PackedExperts.codes.1": lambda s, x: s.pack_experts(biases=x),
    "linear.x": lambda s, x: s.multiply(x=x),
    "linear.norm": lambda s, x: s.multiply(norm=x),
    "linear.residual": lambda s, x: s.multiply(residual=x),
    "linear_heads.x": lambda s, x: s.multiply_heads(x=x),
    "linear_heads.norm": lambda s, x: s.multiply_heads(norm=x),
    "linear_heads.residual": lambda s, x: s.multiply_heads(residual=x),
    "gated_mlp.x": lambda s, x: gated_mlp(x, s.weight, 1e-6, s.packed, s.down, s.workers),
    "gated_mlp.norm": lambda s, x: gated_mlp(s.x, x, 1e-6, s.packed, s.down, s.workers),
    "mixture_mlp.x": lambda s, x: s.mix(x=x),
    "mixture_mlp.norm": lambda s, x: s.mix(norm=x),
    "rms_norm.x": lambda s, x: rms_norm(x, s.weight, 1e-6, s.workers),
    "rms_norm.weight": lambda s, x: rms_norm(s.x, x, 1e-6, s.workers),
    "packed_rows.ids": lambda s, x: packed_rows(x, s.packed, s.workers),
    "choose_tokens.raw": lambda s, x: s.choose(raw=x),
    "choose_tokens.adjusted": lambda s, x: s.choose(adjusted=x),
    "choose_tokens.choices": lambda s, x: s.choose(choices=x),
    "uncounted.array": lambda s, x: uncounted(x, transposable=True),
    "GatedDelta.conv": lambda s, x: s.delta(conv=x),
    "GatedDelta.a_log": lambda s, x: s.delta(a_log=x),
    "GatedDelta.dt_bias": lambda s, x: s.delta(dt_bias=x),
    "GatedDelta.norm": lambda s, x: s.delta(norm=x),
    "gated_delta.token": lambda s, x: s.recur(token=x),
    "gated_delta.qkv": lambda s, x: s.recur(qkv=x),
    "gated_delta.z": lambda s, x: s.recur(z=x),
    "gated_delta.a": lambda s, x: s.recur(a=x),
    "gated_delta.b": lambda s, x: s.recur(b=x),
}

DTYPES = (
    mx.float32,
    mx.bfloat16,
    mx.float16,
    mx.int32,
    mx.uint32,
    mx.uint8,
    mx.bool_,
    mx.complex64,
)
SHAPES = (
    (), (0,), (1,), (32,), (33,), (100,), (0, 32), (1, 32), (2, 0), (2, 5), (2, 32), (2, 33),
    (2, 64), (2, 100), (2, 192), (3, 32), (32, 2), (64, 1), (64, 4), (64, 32), (2, 1, 32),
    (2, 2, 16), (2, 2, 32), (2, 3, 32), (3, 2, 32), (2, 2, 1, 32),
)  # fmt: skip
# More than there is memory for, of one number: seen before anything is taken for them, or refused.
HUGE_SHAPES = (
    (2**31 - 1,),
    (2**31 - 1, 32),
    (2, 2**31 - 1),
    (2**31 - 1, 2**31 - 1),
    (2**31 - 1, 2, 32),
)
FILLINGS = (0, -1, 63, 64, 4000, 2**31 - 1, -(2**31), float("nan"), float("inf"))


def hostile_arrays() -> Iterator[mx.array]:
    """Of every type and shape that somebody might take for a right one; of right shapes and wrong
    contents; of memory that lies in any way."""
    for dtype in DTYPES:
        for shape in SHAPES:
            yield mx.zeros(shape, dtype)
        for shape in HUGE_SHAPES:
            yield mx.broadcast_to(mx.zeros((), dtype), shape)
    for filling in FILLINGS:
        for shape in ((2,), (32,), (2, 5), (2, 32), (2, 64), (2, 100), (2, 2, 32)):
            yield mx.full(shape, filling, mx.float32)
            if filling == filling and abs(filling) < 2**63:
                yield mx.full(shape, int(filling), mx.int32)
    for shape in ((2, 32), (2, 64), (2, 100), (2, 192), (2, 2, 32)):
        yield mx.ones(shape[::-1]).transpose()
        yield mx.ones((3 * shape[0], *shape[1:]))[::-3]
        yield mx.broadcast_to(mx.ones((1,)), shape)


# --- the stub ------------------------------------------------------------------------------------


def places_of(kind: str) -> set[str]:
    """Where the stub takes that type, but for what only Metal has: "function.argument",
    "Class.argument" of its constructor, "Class.method.argument"; ".n" for a place of a tuple."""
    found = set[str]()
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            if node.name not in METAL_FUNCTIONS:
                found |= _places(node, node.name, kind)
        elif isinstance(node, ast.ClassDef) and node.name not in METAL_TYPES:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    made = method.name == "__init__"
                    name = node.name if made else f"{node.name}.{method.name}"
                    found |= _places(method, name, kind)
    return found


def _places(function: ast.FunctionDef, name: str, kind: str) -> set[str]:
    arguments = [a for a in (*function.args.args, *function.args.kwonlyargs) if a.annotation]
    annotations = {a.arg: a.annotation for a in arguments if a.annotation is not None}
    if any(ast.unparse(annotation) in METAL_TYPES for annotation in annotations.values()):
        return set()
    return {
        f"{name}.{argument}{place}"
        for argument, annotation in annotations.items()
        for place in _inside(annotation, kind)
    }


def _inside(annotation: ast.expr, kind: str) -> Iterator[str]:
    """Where in an annotation the type stands: "" for itself, ".2" in a tuple."""
    if ast.unparse(annotation).removesuffix(" | None") == kind:
        yield ""
    elif isinstance(annotation, ast.BinOp):  # one of several types
        yield from _inside(annotation.left, kind)
        yield from _inside(annotation.right, kind)
    elif isinstance(annotation, ast.Subscript):
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else None
        if parts is None:
            yield from _inside(annotation.slice, kind)
        else:
            for number, part in enumerate(parts):
                yield from (f".{number}{place}" for place in _inside(part, kind))


# --- all of them ---------------------------------------------------------------------------------


def attempt(call: Callable[[], object], *, evaluates: bool) -> str:
    """What is wrong with how the call ended; "" where it was refused, or came to a result."""
    try:
        result = call()
    except REFUSED:
        return ""
    except OSError as error:
        return "" if error.errno == errno.ENOMEM else f"a system call failed: {error!r}"
    except RuntimeError as error:
        return "" if str(error).endswith(BUGS) else f"not refused by name: {error!r}"
    found = result if isinstance(result, tuple) else (result,)
    arrays = [x for x in found if isinstance(x, mx.array)]
    if any(size < 0 for x in arrays for size in x.shape):
        return f"shapes {[x.shape for x in arrays]}"
    if evaluates:
        mx.eval(arrays)
    active = mx.get_active_memory()
    return "" if active < MOST_ACTIVE_BYTES else f"{active} bytes of active memory"


def calls() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """All of them, with what they are given, and whether a result can be computed."""
    for name, take in INTEGERS.items():
        for number in HOSTILE:
            # Numbers that are right map and unmap: whoever comes next has memory of his own.
            yield f"{name} = {number}", partial(take, Setting(), number), True
    setting = Setting()
    for array in hostile_arrays():
        for name, look in ARRAYS.items():
            told = f"{name} = {array.dtype} {array.shape}"
            # MLX copies what lies as no kernel reads it, and does not look whether it has memory.
            yield told, partial(look, setting, array), array.size < MOST_NUMBERS


def main() -> None:
    """Prints each call before it is made, so that the last line names one that ends the process;
    ends with 1 where one ended wrongly."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    mx.set_default_device(mx.Device(mx.cpu))
    wrong = 0
    for name, call, evaluates in calls():
        print(name, flush=True)
        if fault := attempt(call, evaluates=evaluates):
            print(f"WRONG: {fault}", flush=True)
            wrong += 1
    sys.exit(1 if wrong else 0)
