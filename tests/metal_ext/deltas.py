"""Gated delta nets of random numbers, their slots, and in float64 what they must give."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from metal_ext import CpuWorkers, GatedDelta, StateMemory, StateRows, gated_delta
from tests.metal_ext.layers import Floats

UNIT_EPS = 1e-6
NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaShape:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 16
    tail_rows: int = 3

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.value_dim, self.key_dim

    @property
    def numbers(self) -> int:
        """Of a state: matrices, and the convolution's rows."""
        return int(np.prod(self.matrices)) + self.tail_rows * self.width

    def __str__(self) -> str:
        dims = f"{self.key_heads} x {self.key_dim}, {self.value_heads} x {self.value_dim}"
        return f"{dims}, {self.tail_rows} rows"


@dataclass(frozen=True)
class State:
    """What a slot holds of a layer."""

    matrices: Floats
    tail: Floats


@dataclass(frozen=True)
class Inputs:
    """Of consecutive tokens of one sequence, float32."""

    qkv: Floats
    z: Floats
    a: Floats
    b: Floats

    @property
    def arrays(self) -> list[Floats]:
        return [self.qkv, self.z, self.a, self.b]

    def __len__(self) -> int:
        return len(self.qkv)

    def part(self, first: int, end: int) -> "Inputs":
        return Inputs(*(x[first:end] for x in self.arrays))


@dataclass(frozen=True)
class Mistakes:
    """What a kernel could do wrong."""

    forgets_the_tail: bool = False
    takes_the_key_head_modulo: bool = False
    decays_after_the_change: bool = False
    leaves_the_queries_long: bool = False
    keeps_the_tail_after_silu: bool = False


RIGHT = Mistakes()


@dataclass(frozen=True)
class DeltaLayer:
    """A layer's constants."""

    shape: DeltaShape
    seed: int = 0

    @cached_property
    def _drawn(self) -> list[Floats]:
        rng, its = np.random.default_rng(self.seed), self.shape
        heads = (its.value_heads,)
        sizes = ((its.tail_rows + 1, its.width), heads, heads, (its.value_dim,))
        conv, a_log, dt_bias, norm = (_singles(rng.normal(size=size)) for size in sizes)
        return [conv, _singles(a_log - 2.0), dt_bias, norm]

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the native layer."""
        names = ("key_heads", "value_heads", "key_dim", "value_dim")
        arrays = zip(("conv", "a_log", "dt_bias", "norm"), map(mx.array, self._drawn), strict=True)
        return (
            {name: getattr(self.shape, name) for name in names} | dict(arrays) | {"eps": NORM_EPS}
        )

    @cached_property
    def native(self) -> GatedDelta:
        return GatedDelta(**self.arguments)

    def inputs(self, tokens: int, seed: int = 1) -> Inputs:
        rng, its = np.random.default_rng(seed), self.shape
        widths = (its.width, its.values, its.value_heads, its.value_heads)
        return Inputs(*(_singles(rng.normal(size=(tokens, n))) for n in widths))

    def state(self, seed: int = 2) -> State:
        rng, its = np.random.default_rng(seed), self.shape
        return State(rng.normal(size=its.matrices), rng.normal(size=(its.tail_rows, its.width)))

    def zeros(self) -> State:
        its = self.shape
        return State(np.zeros(its.matrices), np.zeros((its.tail_rows, its.width)))

    def expected(
        self, inputs: Inputs, state: State, mistakes: Mistakes = RIGHT
    ) -> tuple[Floats, State]:
        """What comes out, and the state behind it. Formulas: arXiv 2412.06464."""
        its = self.shape
        conv, a_log, dt_bias, norm = (x.astype(np.float64) for x in self._drawn)
        qkv, z, a, b = (x.astype(np.float64) for x in inputs.arrays)
        tail = np.zeros_like(state.tail) if mistakes.forgets_the_tail else state.tail
        rows = np.concatenate([tail, qkv])
        taps = its.tail_rows + 1
        mixed = np.stack([(rows[t : t + taps] * conv).sum(axis=0) for t in range(len(qkv))])
        mixed = mixed / (1 + np.exp(-mixed))
        keys = its.key_heads * its.key_dim
        queries, key, value = np.split(mixed, [keys, 2 * keys], axis=1)
        queries, key = (
            _unit(x.reshape(-1, its.key_heads, its.key_dim), mistakes) for x in (queries, key)
        )
        queries = queries * its.key_dim**-0.5
        value = value.reshape(-1, its.value_heads, its.value_dim)
        head = np.arange(its.value_heads)
        if mistakes.takes_the_key_head_modulo:
            head = head % its.key_heads
        else:
            head = head // (its.value_heads // its.key_heads)
        decay = np.exp(-np.exp(a_log) * np.logaddexp(a + dt_bias, 0))[:, :, None, None]
        beta = (1 / (1 + np.exp(-b)))[:, :, None]
        matrices, out = state.matrices.astype(np.float64), np.empty_like(value)
        for t in range(len(qkv)):
            k, q = key[t, head][:, None, :], queries[t, head][:, None, :]
            kept = matrices if mistakes.decays_after_the_change else matrices * decay[t]
            change = (value[t] - (kept * k).sum(axis=-1)) * beta[t]
            matrices = kept + change[:, :, None] * k
            if mistakes.decays_after_the_change:
                matrices = matrices * decay[t]
            out[t] = (matrices * q).sum(axis=-1)
        root = np.sqrt((out * out).mean(axis=-1, keepdims=True) + NORM_EPS)
        made = (out / root * norm).reshape(z.shape) * (z / (1 + np.exp(-z)))
        behind = mixed if mistakes.keeps_the_tail_after_silu else qkv
        return made, State(matrices, np.concatenate([tail, behind])[len(qkv) :])


def _singles(x: Floats) -> Floats:
    """As float32, which checks look at as numbers."""
    return x.astype(np.float32)


def _unit(x: Floats, mistakes: Mistakes) -> Floats:
    if mistakes.leaves_the_queries_long:
        return x
    result: Floats = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + UNIT_EPS)
    return result


Write = tuple[int, int]
"""The number of rows before the write, and the slot that is written."""


@dataclass
class Slots:
    """Slots of one layer in one memory, with room before each."""

    shape: DeltaShape
    count: int = 8
    offset: int = 256
    memory: StateMemory = field(init=False)

    def __post_init__(self) -> None:
        self.slot_bytes = self.offset + 4 * self.shape.numbers
        self.memory = StateMemory(self.count * self.slot_bytes)

    def address(self, slot: int) -> int:
        return self.memory.address + slot * self.slot_bytes

    def raw(self, slot: int) -> Floats:
        """All numbers of a slot, to read and to write."""
        numbers = (ctypes.c_float * (self.slot_bytes // 4)).from_address(self.address(slot))
        return np.ctypeslib.as_array(numbers)

    def put(self, slot: int, state: State) -> None:
        flat = np.concatenate([state.matrices.ravel(), state.tail.ravel()])
        self.raw(slot)[self.offset // 4 :] = flat

    def state(self, slot: int) -> State:
        its, flat = self.shape, self.raw(slot)[self.offset // 4 :].copy()
        matrices, tail = np.split(flat, [int(np.prod(its.matrices))])
        return State(matrices.reshape(its.matrices), tail.reshape(its.tail_rows, its.width))

    def rows(self, segments: Sequence[tuple[int, int | None, list[Write]]]) -> StateRows:
        """segments: of one sequence each, how many rows, the slot that is read, what is written."""
        native = [
            (
                count,
                0 if read is None else self.address(read),
                [(n, self.address(slot)) for n, slot in writes],
            )
            for count, read, writes in segments
        ]
        return StateRows(native, [self.memory])


def step(
    layer: DeltaLayer,
    arrays: Sequence[mx.array],
    rows: StateRows,
    offset: int,
    workers: CpuWorkers,
    token: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The operation. arrays: qkv, z, a and b."""
    qkv, z, a, b = arrays
    before = mx.zeros((1,)) if token is None else token
    return gated_delta(before, qkv, z, a, b, layer.native, rows, offset, workers)


def run(
    layer: DeltaLayer,
    slots: Slots,
    segments: Sequence[tuple[Inputs, int | None, list[Write]]],
    workers: CpuWorkers,
) -> list[Floats]:
    """What comes out of each segment."""
    joined = [
        mx.array(np.concatenate([getattr(inputs, name) for inputs, _, _ in segments]))
        for name in ("qkv", "z", "a", "b")
    ]
    rows = slots.rows([(len(inputs), read, writes) for inputs, read, writes in segments])
    token, made = step(layer, joined, rows, slots.offset, workers)
    mx.eval(token, made)
    ends = np.cumsum([len(inputs) for inputs, _, _ in segments])[:-1]
    return np.split(np.array(made), ends)
