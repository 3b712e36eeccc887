"""Every operation of a substrate's kernels against float64, on this machine."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import metal_ext
from kvcache.backend import PageBackend, Segment, StepRows
from kvcache.canary.reference import (
    DeltaConstants,
    DeltaInputs,
    attention,
    normed,
    recurrent,
    rotated,
    some_of,
)
from kvcache.canary.trial import Action, Finding, require
from kvcache.cell_pool import StateSegment
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, StateSpec
from kvcache.metal_backend import MetalBackend
from kvcache.views import layer_regions

# Sequences of one row, of one more than a split of the decode kernel, and of several splits.
LENGTHS = (1, 257, 600)
MAX_TOKENS = 1024
GATED_ROWS = 33
# A gated delta net's heads: their width, as a GPU's kernels know it, and how many have values; and
# the steps that a sequence's tokens come in.
DELTA_DIM = 128
DELTA_HEADS = 2
DELTA_STEPS = (5, 1, 3)
KV_HEADS = 2
QUERY_HEADS = 8
ROPE_BASE = 1e6
EPS = 1e-6
# Greatest difference of numbers around 1. Some GPUs multiply even float32 with eleven bits.
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.02, mx.bfloat16: 0.06}

Rows = NDArray[np.float64]


def kernel_specs(on_gpu: bool) -> list[KVSpec]:
    """What K and V of a layer may be like: every width of a head, every kind of number."""
    formats = [its for its in KVFormat if on_gpu or its is not KVFormat.FLOAT16]
    return [KVSpec(KV_HEADS, head_dim, format) for head_dim in (64, 128, 256) for format in formats]


def name_of(spec: KVSpec) -> str:
    """Such as "bfloat16 x 128"."""
    return f"{spec.format.value} x {spec.head_dim}"


class KernelTrial:
    """One layer; a heap and a buffer for every length."""

    def __init__(self, backend: PageBackend, layout: KVLayout, *, on_gpu: bool = False) -> None:
        """on_gpu: whether the operations of a GPU's models are tried, too."""
        self._backend = backend
        self._on_gpu = on_gpu
        (self._group,) = layout.groups
        (self._layer,) = layer_regions(layout)
        self._dtype = self._layer.dtype
        self._width = layout.shape.layers[0].head_dim
        self._scale = self._width**-0.5
        self._keeps_states = isinstance(backend, MetalBackend) and self._width == DELTA_DIM
        self._token = mx.zeros((1,))
        self._random = np.random.default_rng(11)
        empty = np.zeros((0, KV_HEADS, self._width))
        self._keys: list[Rows] = [empty] * len(LENGTHS)
        """Of every sequence, as they should be kept."""
        self._values: list[Rows] = [empty] * len(LENGTHS)

    def actions(self) -> list[tuple[str, Action]]:
        """All that is tried, in order."""
        return [
            ("map", self._map),
            *([("states", self._states)] if self._keeps_states else []),
            ("chunk", self._chunk),
            ("decode", self._decode),
            ("project", self._project),
            *([("gate", self._gate)] if self._on_gpu else []),
            ("end", self._end),
        ]

    def _map(self) -> Finding:
        blocks = self._group.blocks_per_heap
        for number in range(len(LENGTHS)):
            made = self._backend.add_heap() and self._backend.add_buffer()
            require(made, "the system refuses a heap or a buffer")
            mapped = self._backend.map(number, 0, number, 0, blocks, writable=True)
            require(mapped, "the system refuses a mapping")
        self._backend.finish_mappings()
        return Finding(f"{len(LENGTHS)} buffers of {blocks} blocks")

    def _states(self) -> Finding:
        """A gated delta net over one sequence's tokens, step by step, with a state that is written
        on the way; and over another's, which goes on from that one."""
        assert isinstance(self._backend, MetalBackend)
        kept = KVFormat(str(self._dtype).removeprefix("mlx.core."))
        spec = StateSpec(1, DELTA_HEADS, self._width, self._width, 3, kept)
        layout = KVShape((), (spec,)).cell
        assert layout is not None
        cells = self._backend.new_states(layout, 3)
        constants = self._delta_constants(spec)
        arrays = [mx.array(its.astype(np.float32)) for its in constants]
        delta = metal_ext.GatedDelta(
            key_heads=1, value_heads=DELTA_HEADS, key_dim=self._width, value_dim=self._width,
            conv=arrays[0], a_log=arrays[1], dt_bias=arrays[2], norm=arrays[3], eps=EPS,
        )  # fmt: skip
        widths = (spec.tail_width, DELTA_HEADS * self._width, DELTA_HEADS, DELTA_HEADS)
        tokens = sum(DELTA_STEPS)
        inputs = [self._kept(self._random.normal(size=(tokens, width))) for width in widths]
        want = recurrent(DeltaInputs(*inputs), constants, EPS)
        token, worst, done = self._token, 0.0, 0
        begun = StateSegment(DELTA_STEPS[0], None, ((2, 1), (DELTA_STEPS[0], 0)))
        for count in DELTA_STEPS:
            parts = [(begun if done == 0 else StateSegment(count, 0, ((count, 0),)), done)]
            if done:  # what follows the state that was written on the way
                parts.append((StateSegment(1, 1, ((1, 2),)), 2))
            rows = self._rows([(number, its.count) for number, (its, _) in enumerate(parts)])
            seen = np.concatenate([np.arange(first, first + its.count) for its, first in parts])
            qkv, z, a, b = (self._array(numbers[seen]) for numbers in inputs)
            states = cells.rows([its for its, _ in parts], rows)
            token, made = states.recur(token, 0, qkv, z, a, b, delta)
            mx.eval(rows.end([made, token]))
            worst = max(worst, _difference(made, want[seen]))
            done += count
        return self._found(worst)

    def _delta_constants(self, spec: StateSpec) -> DeltaConstants:
        heads = (spec.value_heads,)
        shapes = ((spec.tail_rows + 1, spec.tail_width), heads, heads, (spec.value_dim,))
        return DeltaConstants(*(self._random.normal(size=shape) / 2 for shape in shapes))

    def _chunk(self) -> Finding:
        """All but the last row of the longer sequences, each in one piece."""
        worst = 0.0
        for number, length in enumerate(LENGTHS):
            if length > 1:
                worst = max(worst, self._attend([(number, length - 1)]))
        return self._found(worst)

    def _decode(self) -> Finding:
        """The last row of every sequence, all at once."""
        return self._found(self._attend([(number, 1) for number in range(len(LENGTHS))]))

    def _project(self) -> Finding:
        """One row more of every sequence, through norm, RoPE and append at once."""
        plan = [(number, 1) for number in range(len(LENGTHS))]
        rows = self._rows(plan)
        queries, keys, values = (self._draw(heads, plan) for heads in (QUERY_HEADS, KV_HEADS, 2))
        weights = [self._kept(1 + 0.1 * self._random.normal(size=self._width)) for _ in range(2)]
        query_weight, key_weight = (mx.array(weight.astype(np.float32)) for weight in weights)
        half = self._width // 2
        rope = metal_ext.RopeTable([ROPE_BASE ** (-i / half) for i in range(half)])
        transform = metal_ext.QKTransform((query_weight, key_weight, EPS), rope)
        self._token, turned = rows.append(
            self._token,
            self._layer,
            self._array(queries),
            self._array(keys),
            self._array(values),
            transform,
        )
        kept = [
            _copied(rows.region(self._token, self._layer, "keys", number)) for number, _ in plan
        ]
        mx.eval(rows.end([turned, *kept, self._token]))
        positions = np.array([len(keys) for keys in self._keys])
        want = [
            rotated(normed(numbers, weight, EPS), positions, ROPE_BASE)
            for numbers, weight in zip((queries, keys), weights, strict=True)
        ]
        stored = np.stack([_numbers(region)[-1] for region in kept])
        return self._found(max(_difference(turned, want[0]), np.abs(stored - want[1]).max()))

    def _gate(self) -> Finding:
        gate, up = (self._draw(KV_HEADS, [(0, GATED_ROWS)]) for _ in range(2))
        gated = metal_ext.swiglu(self._array(gate), self._array(up))
        return self._found(_difference(gated, gate / (1 + np.exp(-gate)) * up))

    def _end(self) -> Finding:
        require(self._backend.shut_down(), "the device did not answer")
        return Finding("in order")

    # --- what they are made of ------------------------------------------------------------------

    def _attend(self, plan: list[tuple[int, int]]) -> float:
        """Appends and attends; compares what is kept, bit by bit, and what comes out."""
        queries, keys, values = (self._draw(heads, plan) for heads in (QUERY_HEADS, KV_HEADS, 2))
        rows = self._rows(plan)
        token, asked = rows.append(
            self._token,
            self._layer,
            self._array(queries),
            self._array(keys),
            self._array(values),
            None,
        )
        chunk = plan[0][1] > 1
        attended = (
            rows.chunk_attention(token, self._layer, asked, 0, self._scale)
            if chunk
            else rows.decode_attention(token, self._layer, asked, self._scale)
        )
        regions = [
            _copied(rows.region(token, self._layer, kind, number))
            for number in range(len(plan))
            for kind in ("keys", "values")
        ]
        mx.eval(rows.end([attended, *regions, token]))
        self._token = token
        worst, first = 0.0, 0
        got = _numbers(attended)
        for number, (sequence, count) in enumerate(plan):
            its = slice(first, first + count)
            start = len(self._keys[sequence])
            self._keys[sequence] = np.concatenate([self._keys[sequence], keys[its]])
            self._values[sequence] = np.concatenate([self._values[sequence], values[its]])
            past = self._keys[sequence], self._values[sequence]
            for region, kept in zip(regions[2 * number :], past, strict=False):
                require(
                    bool((_numbers(region) == kept).all()), "what is kept is not what was given"
                )
            seen = some_of(count)
            want = attention(queries[its][seen], *past, start + seen, self._scale)
            worst = max(worst, float(np.abs(got[its][seen] - want).max()))
            first += count
        return worst

    def _rows(self, plan: list[tuple[int, int]]) -> StepRows:
        return self._backend.rows(
            [Segment(number, len(self._keys[number]), count) for number, count in plan]
        )

    def _draw(self, heads: int, plan: list[tuple[int, int]]) -> Rows:
        rows = sum(count for _, count in plan)
        return self._kept(self._random.normal(size=(rows, heads, self._width)))

    def _kept(self, numbers: NDArray[np.floating]) -> Rows:
        """The nearest numbers that the layer's kind can be."""
        return _numbers(self._array(numbers))

    def _array(self, numbers: NDArray[np.floating]) -> mx.array:
        return mx.array(numbers.astype(np.float32)).astype(self._dtype)

    def _found(self, worst: float) -> Finding:
        allowed = TOLERANCE[self._dtype]
        said = f"differs by {worst:.1e} at most; {allowed} is allowed"
        require(worst <= allowed, said)
        return Finding(said, {"greatest_difference": worst, "allowed": allowed})


def _copied(region: mx.array) -> mx.array:
    """In memory of MLX's own: that of the GPU alone cannot be read from here."""
    return region.astype(mx.float32) + 0


def _numbers(array: mx.array) -> Rows:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _difference(array: mx.array, want: Rows) -> float:
    return float(np.abs(_numbers(array) - want).max())
