"""project_append: norms, RoPE and append in one, against float64 and against MLX."""

from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.metal.kernels import reference
from tests.metal.kernels.attend import Shape
from tests.metal.kernels.device import Device, struct
from tests.metal.kernels.formats import FORMATS, Floats, Stored
from tests.metal.kernels.store import KINDS, KVStore

BASE, EPS = 1e6, 1e-6
POSITIONS = (0, 1, 15, 16, 700)
# Half a unit in the last place of numbers below 8, and the float32 arithmetic before it.
ROUNDING = {"float": 2e-6, "half": 2e-3 + 2e-6, "bfloat": 1.6e-2}
DIMS = (64, 128, 256)
SMALL = [
    Shape("bfloat", "bfloat", 64, "sparse", 3, 1),
    Shape("float", "float", 128, "dense", 4, 2),
    Shape("half", "bfloat", 256, "paged", 2, 2),
]
COVER = [
    Shape(t, kv, DIMS[(i + i // 3) % 3], kind, 4, 2)
    for i, (t, kv, kind) in enumerate(product(FORMATS, FORMATS, KINDS))
]
CASES = [pytest.param(s, marks=pytest.mark.small, id=f"small-{s}") for s in SMALL]


@dataclass(frozen=True)
class Work:
    """What is done to queries and keys."""

    normed: bool = True
    turned: bool = True
    share: float = 1.0
    """Of a head's dimensions, that turn."""
    base: float = BASE
    scale: float = 1.0
    magnitude: float = 1.0

    def pairs(self, head_dim: int) -> int:
        return int(head_dim * self.share) // 2 if self.turned else 0

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        half = self.pairs(head_dim)
        return (self.scale * self.base ** (-np.arange(half) / half)).astype(np.float32)


ALL = Work()
WORKS = [
    ALL,
    Work(normed=False),
    Work(turned=False),
    Work(normed=False, turned=False),
    Work(magnitude=0.75),
    Work(share=0.25),
    Work(share=0.375, magnitude=0.75),
]


class Projected:
    """Random rows that the kernel has run over."""

    def __init__(
        self,
        device: Device,
        shape: Shape,
        positions: tuple[int, ...] = POSITIONS,
        work: Work = ALL,
    ) -> None:
        random = np.random.default_rng(3)
        self.shape, self.positions, self.work, number = shape, positions, work, shape.number
        rows, dim = len(positions), shape.head_dim
        # Rows of all sizes, some so small that eps counts.
        sizes = np.resize([2e-3, 2.0, 0.05, 30.0] if work.normed else [1.0], (rows, 1, 1))
        self.queries, self.keys, self.values = (
            number.encode(random.normal(size=(rows, heads, dim)) * sizes)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )
        self.query_weight, self.key_weight = (
            random.uniform(0.2, 1.9, size=dim).astype(np.float32) for _ in range(2)
        )
        self.store = shape.store([position + 1 for position in positions])
        self.out = number.nans(rows, shape.query_heads, dim)
        self.run(device, range(rows), self.out)

    def run(self, device: Device, rows: range, out: Stored) -> None:
        """Over some of the rows; out: [rows][query_heads][head_dim]."""
        shape, store, part = self.shape, self.store, slice(rows.start, rows.stop)
        work = self.work
        heads = (shape.query_heads, shape.kv_heads)
        frequencies = np.full(128, np.nan, np.float32)
        pairs = work.pairs(shape.head_dim)
        frequencies[:pairs] = work.frequencies(shape.head_dim)
        arguments = struct(
            "ProjectArguments", *store.place, *heads, len(rows), work.normed,
            pairs, EPS, work.magnitude, 0, frequencies,
        )  # fmt: skip
        table = store.entries([(row, self.positions[row]) for row in rows])
        inputs = [self.queries[part], self.keys[part], self.values[part]]
        weights = [self.query_weight, self.key_weight]
        device.threadgroups(
            f"project_append_{shape.activations}_{shape.kv}_{shape.head_dim}_{shape.kind}",
            [*inputs, *weights, table, store.pages, store.arena, out, arguments],
            (sum(heads), len(rows)),
            (32,),
        )

    def expected(self, rows: Stored, weight: NDArray[np.float32]) -> Floats:
        """In float64, but for the angles."""
        work, heads = self.work, self.shape.number.decode(rows)
        if work.normed:
            heads = reference.normalised(heads, weight.astype(np.float64), EPS)
        if work.turned:
            frequencies = work.frequencies(self.shape.head_dim)
            angles = reference.angles(np.array(self.positions), frequencies)
            turning, rest = np.split(heads, [2 * work.pairs(self.shape.head_dim)], axis=-1)
            turning = work.magnitude * reference.rotated(turning, angles)
            heads = np.concatenate([turning, rest], axis=-1)
        return heads

    def written(self, which: int) -> Floats:
        """The rows of K or V that the store has now."""
        decode = self.store.number.decode
        return np.array(
            [decode(self.store.rows(s, which))[p] for s, p in enumerate(self.positions)]
        )


def check(done: Projected) -> None:
    """Queries, K and V against float64."""
    shape, positions = done.shape, np.array(done.positions)
    queries = done.expected(done.queries, done.query_weight)
    keys = done.expected(done.keys, done.key_weight)
    assert np.abs(queries).max() < 8
    assert np.abs(keys).max() < 8
    # An angle is off by half a unit in its last place where it is rounded to the other side.
    turned = positions[:, None, None] * 2.0**-24 * 8
    out = shape.number.decode(done.out)
    assert (np.abs(out - queries) <= ROUNDING[shape.activations] + turned).all()
    assert (np.abs(done.written(0) - keys) <= ROUNDING[shape.kv] + turned).all()
    values = done.store.number.encode(shape.number.decode(done.values))
    assert np.array_equal(done.store.number.encode(done.written(1)), values), "V is only rounded"


@pytest.mark.parametrize("shape", [*CASES, *COVER], ids=str)
def test_norms_rope_and_append_in_one(device: Device, shape: Shape) -> None:
    check(Projected(device, shape))


@pytest.mark.parametrize("work", WORKS[1:], ids=str)
@pytest.mark.parametrize("shape", CASES)
def test_norms_and_rope_are_each_where_they_are_wanted(
    device: Device, shape: Shape, work: Work
) -> None:
    check(Projected(device, shape, work=work))


@pytest.mark.parametrize("shape", CASES)
def test_no_row_but_those_of_the_table_is_written(device: Device, shape: Shape) -> None:
    done = Projected(device, shape)
    decode = done.store.number.decode
    wanted = KVStore(
        shape.kind, [p + 1 for p in POSITIONS], shape.kv_heads, shape.head_dim, done.store.number
    )
    for sequence, position in enumerate(POSITIONS):
        for which in (0, 1):
            kept = wanted.rows(sequence, which)
            kept[position] = done.store.rows(sequence, which)[position]
            assert not np.isnan(decode(kept[position])).any()
            wanted.write_stored(sequence, which, kept)
    assert done.store.everything() == wanted.everything()


@pytest.mark.parametrize("shape", CASES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: Device, shape: Shape) -> None:
    done = Projected(device, shape)
    written = done.store.everything()
    for row in range(len(POSITIONS)):
        alone = shape.number.nans(1, shape.query_heads, shape.head_dim)
        done.run(device, range(row, row + 1), alone)
        assert np.array_equal(alone[0], done.out[row])
    assert done.store.everything() == written


@pytest.mark.parametrize(("base", "scale"), [(1e4, 1.0), (1e6, 0.25)])
def test_it_is_what_mlx_computes_in_two_steps(
    device: Device, base: float, scale: float, figures: list[str]
) -> None:
    shape = Shape("float", "float", 128, "sparse", 4, 2)
    done = Projected(device, shape, (0, 3, 500, 4000), Work(base=base, scale=scale))
    largest = 0.0
    for row, position in enumerate(done.positions):
        normed = mx.fast.rms_norm(mx.array(done.queries[row]), mx.array(done.query_weight), EPS)
        turned = mx.fast.rope(
            normed[None, :, None],
            shape.head_dim,
            traditional=False,
            base=base,
            scale=scale,
            offset=position,
        )
        largest = max(largest, float(np.abs(np.array(turned)[0, :, 0] - done.out[row]).max()))
    figures.append(f"project, base {base:.0e}, scale {scale}: differs from MLX by {largest:.1e}")
    assert largest <= 5e-3, "MLX's own angles are 4000 * 2 ** -24 off"


def test_large_positions_turn_as_far_as_float32_can_say(device: Device, figures: list[str]) -> None:
    shape = Shape("float", "float", 128, "sparse", 1, 1)
    done = Projected(device, shape, (40959,))
    exact = reference.angles(np.array([40959]), ALL.frequencies(128))
    queries = done.expected(done.queries, done.query_weight)
    error = float(np.abs(shape.number.decode(done.out) - queries).max())
    figures.append(f"project, position 40959, angles to {exact.max():.0f}: error {error:.1e}")
    assert error <= 2e-2
