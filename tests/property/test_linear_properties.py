"""The product of a layer of any shape and kind is the exact one, however its rows are cut."""

import itertools

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_ext import CpuWorkers, instruction_sets, linear, packed_rows
from tests.metal_ext.layers import exact, normal, same_bits
from tests.metal_ext.packed import KINDS, Joined, Kind, part

PANEL = 16
WORKERS = {
    (name, threads): CpuWorkers(threads, name)
    for name in instruction_sets()
    for threads in (1, 2, 3)
}


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    full_panels=st.lists(st.integers(1, 5), max_size=2),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 300),
    rows=st.integers(1, 70),
    cut=st.integers(0, 70),
    name=st.sampled_from(instruction_sets()),
    threads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_any_layer_multiplies_to_what_it_unpacks_to(
    kind: Kind,
    full_panels: list[int],
    outputs: int,
    inputs: int,
    rows: int,
    cut: int,
    name: str,
    threads: tuple[int, int],
) -> None:
    inputs = -(-inputs // kind.group) * kind.group if kind.bits else inputs
    counts = [PANEL * panels for panels in full_panels] + [outputs]
    parts = [part(count, inputs, kind, seed) for seed, count in enumerate(counts)]
    workers, others = WORKERS[name, threads[0]], WORKERS[name, threads[1]]
    its = Joined(parts, workers)
    assert (its.packed.outputs, its.packed.inputs) == (sum(counts), inputs)

    unpacked = exact(packed_rows(mx.arange(sum(counts)), its.packed, others))
    assert (np.abs(unpacked - its.numbers) <= 1e-6 * its.magnitudes).all()

    x = normal((rows, inputs), mx.float32, 9)
    got = linear(x, its.packed, workers)
    assert (np.abs(exact(got) - its.expected(exact(x))) <= its.tolerance(exact(x))).all()
    cuts = sorted({0, min(cut, rows), rows})
    pieces = [linear(x[a:b], its.packed, others) for a, b in itertools.pairwise(cuts)]
    assert same_bits(mx.concatenate(pieces), got)
