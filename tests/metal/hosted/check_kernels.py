"""The Metal operations on buffers of the dense backend, against float64.

    python -m tests.metal.hosted.check_kernels

Made for a virtual machine's GPU, whose arithmetic is not that of any Apple chip: the tolerances are
wide enough for that, and far below what a wrong row, head or mask would make. What such a device
refuses is listed as skipped. The doctor's self-test of kernels follows, which has all other kernels
too. Exit code 1 where a result is wrong, or a real GPU refuses a kernel.
"""

import itertools
import sys
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

import metal_ext
from kvcache.kv_backends import KVBackend
from kvcache.selftest.run import SelfTest, run_selftest
from tests.metal.hosted.device import lacks, may_refuse_kernels
from tests.metal.kernels import reference
from tests.metal.kernels.formats import Floats

PAGE_BYTES = 16 * 1024
CONTEXT = 1024
QUERY_HEADS, KV_HEADS = 6, 2
# Of the sequences before their last token: a single token, either side of a split's end, several
# splits.
LENGTHS = (0, 1, 255, 256, 700)
EPS, ROPE_BASE = 1e-6, 1_000_000.0
# Large enough that some positions outweigh all others: then a wrong one shows.
SPREAD = 3.0
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
HEAD_DIMS = (64, 128, 256)
TOLERANCE = {mx.bfloat16: 3e-2, mx.float16: 5e-3, mx.float32: 2e-3}
SELFTEST_S = 300.0


@dataclass(frozen=True)
class Case:
    """Types of activations and of K and V, and the width of a head."""

    activations: str
    kept: str
    head_dim: int

    def __str__(self) -> str:
        return f"{self.activations} activations, {self.kept} K and V, head_dim {self.head_dim}"


class Layer:
    """One layer's K and V for some sequences on the dense backend."""

    def __init__(self, case: Case) -> None:
        kept = DTYPES[case.kept]
        row_bytes = KV_HEADS * case.head_dim * kept.size
        self.kept = kept
        self.regions = metal_ext.Layer(0, 1, kept)
        self.kv_backend = metal_ext.MetalKVBackend(
            "dense",
            metal_ext.Geometry(
                page_bytes=PAGE_BYTES,
                tokens_per_block=CONTEXT,
                blocks_per_heap=1,
                blocks_per_range=1,
                region_row_bytes=[row_bytes, row_bytes],
            ),
            len(LENGTHS),
        )
        self.mapper = metal_ext.Mapper()
        self.ranges = [self.kv_backend.new_range() for _ in LENGTHS]
        self.heaps = [self.kv_backend.new_heap() for _ in LENGTHS]
        tickets = [
            self.mapper.map(range_, heap, 0, 0, 1, True)
            for range_, heap in zip(self.ranges, self.heaps, strict=True)
        ]
        if not self.mapper.wait(tickets[-1], 30.0):
            raise RuntimeError("mapping took over 30 s")


def check(case: Case, seed: int) -> float:
    """The largest error, as a share of what is allowed.

    Raises RuntimeError where the device refuses a kernel.
    """
    layer = Layer(case)
    sequences = list(zip(layer.ranges, LENGTHS, strict=True))
    random = np.random.default_rng(seed)
    past = (
        _random(random, case, sum(LENGTHS), KV_HEADS),
        _random(random, case, sum(LENGTHS), KV_HEADS),
    )
    rows = layer.kv_backend.rows([(range_, 0, length) for range_, length in sequences if length])
    try:
        token = metal_ext.append(mx.zeros((1,)), *past, rows, layer.regions, layer.kv_backend)
        mx.eval(metal_ext.step_end([token], rows, layer.kv_backend))
        worst = _stored(layer, case, past, token)
        rows = layer.kv_backend.rows([(range_, length, 1) for range_, length in sequences])
        return max(worst, _step(layer, case, rows, token, random))
    finally:
        if layer.kv_backend.completed_epoch < rows.epoch:
            layer.kv_backend.abandon(rows)
        if not layer.kv_backend.shutdown():
            raise RuntimeError(f"the device did not end: {layer.kv_backend.failure}")


def _stored(layer: Layer, case: Case, past: tuple[mx.array, mx.array], token: mx.array) -> float:
    """0 where every row of the past is where it belongs, bit for bit; else infinite."""
    start = 0
    for sequence, length in enumerate(LENGTHS):
        for region, given in enumerate(past if length else ()):
            expected = given[start : start + length].astype(layer.kept)
            found = _region(layer, case, sequence, region, length, token)
            if not bool(mx.array_equal(found, expected)):
                return float("inf")
        start += length
    return 0.0


def _step(
    layer: Layer,
    case: Case,
    rows: "metal_ext.MetalRows",
    token: mx.array,
    random: np.random.Generator,
) -> float:
    """Projects and appends a token of every sequence, and attends from it."""
    queries = _random(random, case, len(LENGTHS), QUERY_HEADS)
    keys, values = (_random(random, case, len(LENGTHS), KV_HEADS) for _ in range(2))
    of_queries, of_keys = (
        mx.array((1.0 + 0.1 * random.standard_normal(case.head_dim)).astype(np.float32))
        for _ in range(2)
    )
    rope = metal_ext.RopeTable(frequencies(case.head_dim).tolist())
    token, projected = metal_ext.project_append(
        token, queries, keys, values, (of_queries, of_keys, EPS), rope, rows, layer.regions,
        layer.kv_backend,
    )  # fmt: skip
    scale = SPREAD * case.head_dim**-0.5
    attended = metal_ext.decode_attention(
        token, projected, rows, 0, layer.regions, KV_HEADS, scale, layer.kv_backend
    )
    mx.eval(metal_ext.step_end([attended, projected, token], rows, layer.kv_backend))
    of_activations, of_kept = TOLERANCE[queries.dtype], TOLERANCE[layer.kept]
    worst = 0.0
    for sequence, length in enumerate(LENGTHS):
        kept_keys, kept_values = (
            _exact(_region(layer, case, sequence, region, length + 1, token)) for region in (0, 1)
        )
        query, key = (
            turned(_exact(array[sequence]), _exact(weight), length)
            for array, weight in zip((queries, keys), (of_queries, of_keys), strict=True)
        )
        # From what the kernels made of queries and keys, so that errors do not add up.
        expected = reference.attention(_exact(projected[sequence]), kept_keys, kept_values, scale)
        worst = max(
            worst,
            share_of_allowed(_exact(projected[sequence]), query, of_activations),
            share_of_allowed(kept_keys[-1], key, max(of_activations, of_kept)),
            share_of_allowed(kept_values[-1], _exact(values[sequence].astype(layer.kept)), 0.0),
            share_of_allowed(_exact(attended[sequence]), expected, of_activations),
        )
    return worst


def _random(random: np.random.Generator, case: Case, rows: int, heads: int) -> mx.array:
    numbers = random.standard_normal((rows, heads, case.head_dim))
    return mx.array(numbers.astype(np.float32)).astype(DTYPES[case.activations])


def _region(
    layer: Layer, case: Case, sequence: int, region: int, tokens: int, token: mx.array
) -> mx.array:
    return metal_ext.region_view(
        token, layer.ranges[sequence], region, tokens, KV_HEADS, case.head_dim, layer.kept,
        layer.kv_backend,
    )  # fmt: skip


def _exact(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def turned(rows: Floats, weight: Floats, position: int) -> Floats:
    """RMS norm over the last axis, then RoPE over its halves. rows: ``[heads, head_dim]``."""
    normed = reference.normalised(rows, weight, EPS)[None]
    angles = reference.angles(np.array([position]), frequencies(rows.shape[-1]))
    heads: Floats = reference.rotated(normed, angles)[0]
    return heads


def frequencies(head_dim: int) -> NDArray[np.float32]:
    """Of RoPE, in radians per position."""
    half = head_dim // 2
    return (ROPE_BASE ** (-np.arange(half) / half)).astype(np.float32)


def share_of_allowed(found: Floats, expected: Floats, tolerance: float) -> float:
    """The largest difference as a share of the tolerance; of 0 nothing may differ."""
    difference = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    largest = float(np.nan_to_num(difference, nan=np.inf).max())
    if tolerance == 0.0:
        return float("inf") if largest else 0.0
    return largest / tolerance


def main() -> int:
    """The exit code."""
    missing = lacks("dense")
    if missing:
        print(f"SKIPPED everything: {'; '.join(missing)}")
        return 0
    excused = may_refuse_kernels()
    print(f"This GPU is {'one that may refuse kernels' if excused else 'to run every kernel'}.")
    wrong = skipped = 0
    cases = [Case(*types) for types in itertools.product(DTYPES, DTYPES, HEAD_DIMS)]
    for seed, case in enumerate(cases):
        try:
            share = check(case, seed)
        except RuntimeError as error:
            print(f"{'SKIPPED' if excused else 'WRONG'} {case}: {error}")
            skipped += excused
            wrong += not excused
            continue
        print(f"{'WRONG' if share > 1 else 'good'} {case}: {share:.2f} of the allowed error")
        wrong += share > 1
    print(f"{len(cases) - skipped - wrong} cases good, {skipped} skipped, {wrong} wrong")
    report = run_selftest(SelfTest.KERNELS, KVBackend.METAL_DENSE, limit_s=SELFTEST_S)
    if report.fault:
        print(f"{'SKIPPED' if excused else 'WRONG'} the self-test: {report.fault}")
        wrong += not excused
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
