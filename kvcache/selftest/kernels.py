"""The self-test that compares the results of kernels and of MLX's products with float64."""

import time
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import metal_ext
from kvcache.backends.backend import PageBackend, Segment, StepRows
from kvcache.backends.metal import MetalBackend
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, StateSpec
from kvcache.selftest.kv_backend import NamedCheck, add, map_blocks, require, shut_down
from kvcache.selftest.reference import (
    DeltaConstants,
    DeltaInputs,
    attention,
    gated_delta,
    rms_norm,
    rope,
    sample_rows,
)
from kvcache.selftest.run import Result
from kvcache.slots import StateSegment
from kvcache.views import layer_regions

# The number of rows of each sequence. The decode kernel divides more than 256 rows into splits, so
# that these sequences need no split, two splits, and more.
LENGTHS = (1, 257, 600)
MAX_TOKENS = 1024
# The sizes of the tested gated delta net (a recurrent layer): the width of heads (the only one that
# a GPU's kernels support), the number of value heads, and the number of tokens in each step.
DELTA_DIM = 128
DELTA_HEADS = 2
DELTA_STEPS = (5, 1, 3)
KV_HEADS = 2
# One number of query heads for each size of the tiles that read K and V together on a GPU.
QUERY_HEADS, DECODED_HEADS = 8, (8, 12, 16)
ROPE_BASE = 1e6
# How often a timed step reads K and V, which hides what a step takes besides; and timed steps.
READS, TIMED_STEPS = 32, 4
EPS = 1e-6
# The allowed error of results around 1. Some GPUs multiply even float32 with 11 bits.
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.02, mx.bfloat16: 0.06}
# The numbers of rows in a product: one row, a few rows, and enough rows for matrix units.
PRODUCT_ROWS = (1, 8, 64)
# Quire's own kernels read a matrix once for 1 row, for 2, and for each 4 of more.
OWN_ROWS = (1, 2, 8)
INPUTS, OUTPUTS = 1024, 512
BITS, GROUP = 4, 64
# The numbers of rows of one sequence in a step with 1 to 8 drafted tokens, and the outputs of a
# large matrix. For those, MLX takes the kernel for many rows from 6 rows on (on M1 and M2).
DRAFTED_ROWS, MANY_OUTPUTS = range(2, 10), 8192
# The shape of a stack of experts' matrices, and the numbers of pairs of a row and its expert: few,
# and enough for the kernel that reads an expert's weights once for all of its pairs.
EXPERTS = (16, 256, 512)
PAIRS = (8, 128)
# The numbers of rows of a mixture, in which 9 rows share experts, and of experts for each row.
MIXED_ROWS, CHOSEN = (1, 9), 6
# The allowed error, as a share of the greatest result. A GPU rounds inputs and results to 8 bits,
# but not sums. On a CPU, MLX computes in float32.
PRODUCT_TOLERANCE = 0.02

Rows = NDArray[np.float64]


def kernel_specs(on_gpu: bool) -> list[KVSpec]:
    """Return the shapes of K and V to test: every head width with every format of the device."""
    formats = [kind for kind in KVFormat if on_gpu or kind is not KVFormat.FLOAT16]
    return [KVSpec(KV_HEADS, head_dim, kind) for head_dim in (64, 128, 256) for kind in formats]


def name_of(spec: KVSpec) -> str:
    return f"{spec.format.value} x {spec.head_dim}"


class KernelChecks:
    """Checks of one layer's kernels, with one heap and one buffer per sequence of ``LENGTHS``."""

    def __init__(self, backend: PageBackend, layout: KVLayout, *, on_gpu: bool = False) -> None:
        """If ``on_gpu`` is True, operations that only models on a GPU use are checked as well."""
        self._backend = backend
        self._on_gpu = on_gpu
        (self._group,) = layout.groups
        (self._layer,) = layer_regions(layout)
        self._dtype = self._layer.dtype
        self._width = layout.shape.layers[0].head_dim
        self._softmax = metal_ext.Softmax(self._width**-0.5)
        self._keeps_states = isinstance(backend, MetalBackend) and self._width == DELTA_DIM
        self._token = mx.zeros((1,))
        self._random = np.random.default_rng(11)
        empty = np.zeros((0, KV_HEADS, self._width))
        self._keys: list[Rows] = [empty] * len(LENGTHS)
        """The keys that the cache should hold, for each sequence."""
        self._values: list[Rows] = [empty] * len(LENGTHS)

    def checks(self) -> list[NamedCheck]:
        """Return the checks. Only the first use of a kernel takes the time to compile it."""
        return [
            ("map", self._map),
            *([("states", self._states)] if self._keeps_states else []),
            ("chunk", self._chunk),
            ("decode", self._decode),
            ("decode again", self._decode),
            ("project", self._project),
            ("project again", self._project),
            *([("products", self._products)] if self._on_gpu else []),
            ("end", lambda: shut_down(self._backend)),
        ]

    def _map(self) -> Result:
        blocks = self._group.blocks_per_heap
        for number in range(len(LENGTHS)):
            add(self._backend, heaps=1, buffers=1)
            map_blocks(self._backend, number, 0, 0, blocks, heap=number)
        self._backend.finish_mappings()
        return Result(f"{len(LENGTHS)} buffers of {blocks} blocks")

    def _states(self) -> Result:
        """Run a gated delta net over one sequence in several steps. The first step also writes
        the state after two tokens, from which a second sequence continues."""
        assert isinstance(self._backend, MetalBackend)
        tail_format = KVFormat(str(self._dtype).removeprefix("mlx.core."))
        spec = StateSpec(1, DELTA_HEADS, self._width, self._width, 3, tail_format)
        layout = KVShape((), (spec,)).slot
        assert layout is not None
        slots = self._backend.new_states(layout, 3)
        require(all(map(slots.commit, range(3))), "the system refuses a slot")
        constants = self._delta_constants(spec)
        arrays = [mx.array(numbers.astype(np.float32)) for numbers in constants]
        delta = metal_ext.GatedDelta(
            key_heads=1, value_heads=DELTA_HEADS, key_dim=self._width, value_dim=self._width,
            conv=arrays[0], a_log=arrays[1], dt_bias=arrays[2], norm=arrays[3], eps=EPS,
        )  # fmt: skip
        widths = (spec.tail_width, DELTA_HEADS * self._width, DELTA_HEADS, DELTA_HEADS)
        tokens = sum(DELTA_STEPS)
        inputs = [self._rounded(self._random.normal(size=(tokens, width))) for width in widths]
        want = gated_delta(DeltaInputs(*inputs), constants, EPS)
        token, worst, done = self._token, 0.0, 0
        begun = StateSegment(DELTA_STEPS[0], None, ((2, 1), (DELTA_STEPS[0], 0)))
        for count in DELTA_STEPS:
            parts = [(begun if done == 0 else StateSegment(count, 0, ((count, 0),)), done)]
            if done:  # a second sequence continues from the first step's state
                parts.append((StateSegment(1, 1, ((1, 2),)), 2))
            rows = self._rows([(number, part.count) for number, (part, _) in enumerate(parts)])
            places = np.concatenate([np.arange(start, start + p.count) for p, start in parts])
            qkv, z, a, b = (self._array(numbers[places]) for numbers in inputs)
            states = slots.rows([part for part, _ in parts], rows)
            token, output = states.recur(token, 0, qkv, z, a, b, delta)
            mx.eval(rows.end([output, token]))
            worst = max(worst, _difference(output, want[places]))
            done += count
        return self._compared(worst)

    def _delta_constants(self, spec: StateSpec) -> DeltaConstants:
        heads = (spec.value_heads,)
        shapes = ((spec.tail_rows + 1, spec.tail_width), heads, heads, (spec.value_dim,))
        return DeltaConstants(*(self._random.normal(size=shape) / 2 for shape in shapes))

    def _chunk(self) -> Result:
        """Check attention over all rows but the last, as a chunk, in sequences of several rows."""
        worst = 0.0
        for number, length in enumerate(LENGTHS):
            if length > 1:
                worst = max(worst, self._attend([(number, length - 1)]))
        return self._compared(worst)

    def _decode(self) -> Result:
        """Check attention over the last row of all sequences, in a call for each size of tiles."""
        plan = [(number, 1) for number in range(len(LENGTHS))]
        return self._compared(max(self._attend(plan, heads) for heads in DECODED_HEADS))

    def _project(self) -> Result:
        """Check one further row of each sequence: norm, RoPE and append in one call."""
        plan = [(number, 1) for number in range(len(LENGTHS))]
        rows = self._rows(plan)
        queries, keys, values = (self._draw(heads, plan) for heads in (QUERY_HEADS, KV_HEADS, 2))
        weights = [self._rounded(1 + 0.1 * self._random.normal(size=self._width)) for _ in range(2)]
        query_weight, key_weight = (mx.array(weight.astype(np.float32)) for weight in weights)
        half = self._width // 2
        table = metal_ext.RopeTable([ROPE_BASE ** (-i / half) for i in range(half)])
        transform = metal_ext.QKTransform((query_weight, key_weight, EPS), table)
        q, k, v = map(self._array, (queries, keys, values))
        self._token, turned = rows.append(self._token, self._layer, q, k, v, transform)
        kept = [
            _copied(rows.region(self._token, self._layer, "keys", number)) for number, _ in plan
        ]
        mx.eval(rows.end([turned, *kept, self._token]))
        positions = np.array([len(keys) for keys in self._keys])
        want = [
            rope(rms_norm(numbers, weight, EPS), positions, ROPE_BASE)
            for numbers, weight in zip((queries, keys), weights, strict=True)
        ]
        stored = np.stack([_numbers(region)[-1] for region in kept])
        return self._compared(max(_difference(turned, want[0]), np.abs(stored - want[1]).max()))

    def _products(self) -> Result:
        """Multiply a few rows by the plain numbers of gate and up, with quire's own kernel."""
        shapes = ((OWN_ROWS[-1], self._width), *[(self._width, self._width)] * 2)
        x, *weights = (self._rounded(self._random.normal(size=n) / n[1] ** 0.25) for n in shapes)
        arrays = [self._array(numbers) for numbers in weights]
        mx.eval(arrays)
        gated = metal_ext.multiply_gated(self._array(x), *map(metal_ext.StoredMatrix, arrays))
        gate, up = (x @ numbers.T for numbers in weights)
        return self._compared(_difference(gated, gate / (1 + np.exp(-gate)) * up))

    # --- running steps and comparing results ------------------------------------------------------

    def _attend(self, plan: list[tuple[int, int]], query_heads: int = QUERY_HEADS) -> float:
        """Append rows and compute their attention. Require exact K and V; return the largest
        error."""
        queries, keys, values = (self._draw(heads, plan) for heads in (query_heads, KV_HEADS, 2))
        rows = self._rows(plan)
        q, k, v = map(self._array, (queries, keys, values))
        token, turned = rows.append(self._token, self._layer, q, k, v, None)
        if plan[0][1] > 1:
            attended = rows.chunk_attention(token, self._layer, turned, 0, self._softmax)
        else:
            attended = rows.decode_attention(token, self._layer, turned, self._softmax)
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
            rows_of_it = slice(first, first + count)
            start = len(self._keys[sequence])
            self._keys[sequence] = np.concatenate([self._keys[sequence], keys[rows_of_it]])
            self._values[sequence] = np.concatenate([self._values[sequence], values[rows_of_it]])
            past = self._keys[sequence], self._values[sequence]
            for region, kept in zip(regions[2 * number :], past, strict=False):
                require(
                    bool((_numbers(region) == kept).all()), "what is kept is not what was given"
                )
            samples = sample_rows(count)
            at, scale = start + samples, self._softmax.scale
            want = attention(queries[rows_of_it][samples], *past, at, scale)
            worst = max(worst, float(np.abs(got[rows_of_it][samples] - want).max()))
            first += count
        return worst

    def _rows(self, plan: list[tuple[int, int]]) -> StepRows:
        return self._backend.rows(
            [Segment(number, len(self._keys[number]), count) for number, count in plan]
        )

    def _draw(self, heads: int, plan: list[tuple[int, int]]) -> Rows:
        rows = sum(count for _, count in plan)
        return self._rounded(self._random.normal(size=(rows, heads, self._width)))

    def _rounded(self, numbers: NDArray[np.floating]) -> Rows:
        return _numbers(self._array(numbers))

    def _array(self, numbers: NDArray[np.floating]) -> mx.array:
        return mx.array(numbers.astype(np.float32)).astype(self._dtype)

    def _compared(self, worst: float) -> Result:
        allowed = TOLERANCE[self._dtype]
        text = f"differs by {worst:.1e} at most; {allowed} is allowed"
        require(worst <= allowed, text)
        return Result(text, {"greatest_difference": worst, "allowed": allowed})


class BandwidthChecks(KernelChecks):
    """Measures how fast attention reads K and V, with one row of one sequence, and of each."""

    def checks(self) -> list[NamedCheck]:
        counts = (1, len(LENGTHS))
        return [("map", self._map), *((f"{n} sequences", partial(self._read, n)) for n in counts)]

    def _read(self, sequences: int) -> Result:
        """Time steps in which the last row of each sequence attends READS times to all rows."""
        plan = [(number, 1) for number in range(sequences)]
        kv_heads, tokens = self._layer.kv_heads, self._group.max_tokens
        query_heads = QUERY_HEADS // KV_HEADS * kv_heads
        queries, keys = (self._array(self._draw(heads, plan)) for heads in (query_heads, kv_heads))
        steps_s = []
        for _ in range(TIMED_STEPS):
            rows = self._backend.rows([Segment(number, tokens - 1, 1) for number, _ in plan])
            self._token, turned = rows.append(self._token, self._layer, queries, keys, keys, None)
            operands = self._token, self._layer, turned, self._softmax
            attended = [rows.decode_attention(*operands) for _ in range(READS)]
            arrays = rows.end([*attended, self._token])
            started = time.monotonic()
            mx.eval(arrays)
            steps_s.append(time.monotonic() - started)
        per_s = READS * sequences * tokens * self._group.bytes_per_token / min(steps_s)
        return Result(f"{per_s / 1e9:.1f} GB/s", {"bytes_per_s": per_s})


def _copied(region: mx.array) -> mx.array:
    """Copy a region into MLX's memory, because the host cannot read memory that only a GPU has."""
    return region.astype(mx.float32) + 0


def _numbers(array: mx.array) -> Rows:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _difference(array: mx.array, want: Rows) -> float:
    return float(np.abs(_numbers(array) - want).max())


# --- products with weights in four bits -----------------------------------------------------------


def product_checks(*, on_gpu: bool = False) -> list[NamedCheck]:
    """Return a check for each number of rows, and two for each number of pairs of a row and its
    expert. MLX chooses a kernel by these numbers, and some systems compile one of the kernels
    wrongly. If ``on_gpu`` is True, quire's own kernels are checked as well."""
    checks: list[NamedCheck] = [(f"multiply {n}", partial(_multiply, n)) for n in PRODUCT_ROWS]
    for pairs in PAIRS:
        checks.append((f"experts {pairs}", partial(_choose, pairs)))
        checks.append((f"experts {pairs} in order", partial(_choose, pairs, in_order=True)))
    if on_gpu:
        checks += [(f"quire multiplies {n}", partial(_multiply, n, own=True)) for n in OWN_ROWS]
        checks += [(f"quire mixes {n}", partial(_mix, n)) for n in MIXED_ROWS]
    return checks


def equal_bits_checks(*, on_gpu: bool = False) -> list[NamedCheck]:
    return [
        (f"{'quire multiplies' if own else 'multiply'} {rows} by {outputs}",
         partial(_multiply, rows, outputs, own=own))
        for own in (False, True)[: 1 + on_gpu]
        for outputs in (OUTPUTS, MANY_OUTPUTS)
        for rows in DRAFTED_ROWS
    ]  # fmt: skip


def _multiply(rows: int, outputs: int = OUTPUTS, *, own: bool = False) -> Result:
    """Multiply rows together, and count those whose bits differ if they are multiplied alone."""
    random = np.random.default_rng(rows)
    inputs, weights = _drawn(random, rows, INPUTS), _drawn(random, outputs, INPUTS)
    packed = mx.quantize(weights, group_size=GROUP, bits=BITS)
    mx.eval(packed)

    def multiply(x: mx.array) -> mx.array:
        if own:
            matrix = metal_ext.StoredMatrix(*packed, group_size=GROUP, bits=BITS)
            return metal_ext.multiply(x, [matrix])[0]
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=GROUP, bits=BITS)

    got, alone = multiply(inputs), mx.concatenate([multiply(row[None]) for row in inputs])
    others = int((got != alone).any(axis=1).sum())
    result = _judged(got, _numbers(inputs) @ _unpacked(*packed).T)
    text = f"{result.text}; {others} of {rows} rows have other bits than alone"
    return Result(text, {**result.figures, "rows_with_other_bits": others})


def _choose(pairs: int, *, in_order: bool = False) -> Result:
    """Multiply rows by the matrices of random experts, which ascend if ``in_order`` is True."""
    random = np.random.default_rng(pairs)
    inputs = _drawn(random, pairs, 1, EXPERTS[-1])
    weights = mx.quantize(_drawn(random, *EXPERTS), group_size=GROUP, bits=BITS)
    experts = random.integers(0, EXPERTS[0], pairs)
    if in_order:
        experts.sort()
    got = mx.gather_qmm(
        inputs, *weights, rhs_indices=mx.array(experts.astype(np.uint32)),
        transpose=True, group_size=GROUP, bits=BITS, sorted_indices=in_order,
    )  # fmt: skip
    plain, rows = _unpacked(*weights), _numbers(inputs)
    return _judged(got, np.stack([x @ plain[e].T for x, e in zip(rows, experts, strict=True)]))


def _mix(rows: int) -> Result:
    """Compute a mixture by quire's own kernels."""
    random, (experts, inner, hidden) = np.random.default_rng(rows), EXPERTS
    x, residual = (_drawn(random, rows, hidden) for _ in range(2))
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    # Products of about 1, whose gates are neither shut nor open.
    stacks = [
        mx.quantize(_drawn(random, experts, *shape) * shape[1] ** -0.5, group_size=GROUP, bits=BITS)
        for shape in shapes
    ]
    mx.eval(stacks)
    *gate_up, down = (metal_ext.StoredMatrix(*s, bits=BITS, group_size=GROUP) for s in stacks)
    mixture = metal_ext.Mixture(gate_up, down, [], chosen=CHOSEN, normalised=True)
    logits = np.stack([random.permutation(experts) for _ in range(rows)]) / 4
    got = metal_ext.mixture(x, residual, mx.array(logits).astype(x.dtype), mixture)
    plain, want = [_unpacked(*stack) for stack in stacks], _numbers(residual)
    for number, (row, powers) in enumerate(zip(_numbers(x), np.exp(logits), strict=True)):
        best = np.argsort(-powers)[:CHOSEN]
        for expert in best:
            gate, up, out = (stack[expert] for stack in plain)
            gated = gate @ row / (1 + np.exp(-gate @ row)) * (up @ row)
            want[number] += powers[expert] / powers[best].sum() * (out @ gated)
    return _judged(got, want)


def _drawn(random: np.random.Generator, *shape: int) -> mx.array:
    dtype = mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32
    return mx.array(random.normal(size=shape).astype(np.float32)).astype(dtype)


def _judged(got: mx.array, want: Rows) -> Result:
    worst = _difference(got, want) / float(np.abs(want).max())
    text = f"differs by {worst:.1e} of the greatest result; {PRODUCT_TOLERANCE} is allowed"
    require(worst <= PRODUCT_TOLERANCE, text)
    return Result(text, {"greatest_difference": worst, "allowed": PRODUCT_TOLERANCE})


def _unpacked(codes: mx.array, scales: mx.array, biases: mx.array) -> Rows:
    """Return the weights ``code * scale + bias``. A word has its first code in the lowest bits."""
    words = np.array(codes)[..., None] >> np.arange(0, 32, BITS, dtype=np.uint32)
    plain = (words & ((1 << BITS) - 1)).reshape(*scales.shape, GROUP)
    scale, bias = (_numbers(array)[..., None] for array in (scales, biases))
    weights: Rows = (plain * scale + bias).reshape(*codes.shape[:-1], -1)
    return weights
