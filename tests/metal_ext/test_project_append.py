"""RoPE's angles, and norm, RoPE and append in one, against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    AddressRange,
    CpuWorkers,
    RopeTable,
    RowTable,
    instruction_sets,
    project_append,
    rope_angles,
)
from tests.metal_ext.layers import (
    DTYPES,
    KEY_REGION,
    VALUE_REGION,
    Floats,
    PagedLayer,
    exact,
    normal,
    same_bits,
)
from tests.metal_ext.packed import normed

EPS = 1e-6
BASE = 1e4
QUERY_HEADS = 6
# Of the largest number of a head, whose two halves are turned into each other.
TOLERANCE = 3e-6
# Positions of pages that others wrote stay as they are; a chunk, a token far behind, and a third.
SEGMENTS = ((1, 17, 40), (0, 39, 1), (2, 0, 3))
EACH_SET = pytest.mark.parametrize("instruction_set", instruction_sets())


def positions(segments: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(start, start + count) for _, start, count in segments])


def turns(places: np.ndarray, head_dim: int, base: float, scale: float) -> Floats:
    """The angle of every position and dimension."""
    half = np.arange(head_dim // 2)
    result: Floats = places[:, None] * (scale * base ** (-2.0 * half / head_dim))
    return result


def table(
    head_dim: int, base: float = BASE, scale: float = 1.0, magnitude: float = 1.0
) -> RopeTable:
    frequencies = scale * base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    return RopeTable(frequencies.tolist(), magnitude)


def turned(heads: Floats, angles: Floats) -> Floats:
    """RoPE of ``[rows, heads, head_dim]``: the first half against the second."""
    first, second = np.split(heads, 2, axis=-1)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


class Projection:
    """Rows of one matrix for some segments of a paged layer."""

    def __init__(self, workers: CpuWorkers, dtype: mx.Dtype = mx.float32, **how: int) -> None:
        self.workers = workers
        self.paged = PagedLayer((40, 200, 90), dtype=dtype, workers=workers, **how)
        heads, dims = self.paged.kv_heads, self.paged.head_dim
        self.rows = self.paged.rows(*SEGMENTS)
        joined = normal((len(self.rows), QUERY_HEADS + 2 * heads, dims), mx.float32, 1)
        self.queries, self.keys, self.values = mx.split(
            joined, [QUERY_HEADS, QUERY_HEADS + heads], axis=1
        )
        self.weights = [1 + 0.2 * normal((dims,), mx.float32, seed) for seed in (2, 3)]
        self.angles = rope_angles(self.rows, table(dims), workers)

    @property
    def heads(self) -> dict[str, mx.array]:
        return {"queries": self.queries, "keys": self.keys, "values": self.values}

    def run(self, **changes: Any) -> tuple[mx.array, mx.array]:
        """The new token and the queries. changes: other arguments."""
        how: dict[str, Any] = {
            "token": self.paged.token,
            **self.heads,
            "norms": (*self.weights, EPS),
            "angles": self.angles,
            "rows": self.rows,
            "layer": self.paged.layer,
            "workers": self.workers,
        }
        made: tuple[mx.array, mx.array] = project_append(**how | changes)
        return made

    def expected(self, *, norms: bool = True, rope: bool = True) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values in float64."""
        queries, keys, values = (exact(x) for x in (self.queries, self.keys, self.values))
        if norms:
            q_weight, k_weight = (exact(weight) for weight in self.weights)
            queries, keys = normed(queries, q_weight, EPS), normed(keys, k_weight, EPS)
        if rope:
            angles = turns(positions(SEGMENTS), self.paged.head_dim, BASE, 1.0)
            queries, keys = turned(queries, angles), turned(keys, angles)
        return queries, keys, values

    def check_kept(self, keys: Floats, values: Floats, tolerance: float) -> None:
        """Compares what stands in the regions."""
        first = 0
        for sequence, start, count in SEGMENTS:
            part, place = slice(first, first + count), slice(start, start + count)
            written = self.paged.numbers(sequence, KEY_REGION)[place]
            assert close(written, keys[part], tolerance), sequence
            written = self.paged.numbers(sequence, VALUE_REGION)[place]
            kept = mx.array(values[part].astype(np.float32)).astype(self.paged.dtype)
            assert np.array_equal(written, exact(kept)), sequence
            first += count


def close(got: Floats, want: Floats, tolerance: float) -> bool:
    """Within the tolerance of each head's largest number."""
    return bool((np.abs(got - want) <= tolerance * np.abs(want).max(axis=-1, keepdims=True)).all())


@EACH_SET
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 32), (1, 64), (3, 128), (6, 256)])
def test_queries_come_back_and_keys_and_values_are_where_they_belong(
    instruction_set: str, dtype: mx.Dtype, kv_heads: int, head_dim: int
) -> None:
    its = Projection(CpuWorkers(2, instruction_set), dtype, kv_heads=kv_heads, head_dim=head_dim)
    token, queries = its.run()
    mx.eval(token, queries)
    want, keys, values = its.expected()
    assert (queries.shape, queries.dtype) == ((44, QUERY_HEADS, head_dim), mx.float32)
    assert close(exact(queries), want, TOLERANCE)
    rounding = 2.0**-8 if dtype == mx.bfloat16 else 0.0
    its.check_kept(keys, values, TOLERANCE + rounding)


@EACH_SET
@pytest.mark.parametrize(("norms", "rope"), [(True, False), (False, True), (False, False)])
def test_norms_and_rope_are_each_where_they_are_wanted(
    instruction_set: str, norms: bool, rope: bool
) -> None:
    its = Projection(CpuWorkers(2, instruction_set))
    absent: dict[str, Any] = {} if norms else {"norms": None}
    absent |= {} if rope else {"angles": None}
    _, queries = its.run(**absent)
    mx.eval(queries)
    want, keys, values = its.expected(norms=norms, rope=rope)
    tolerance = TOLERANCE if norms or rope else 0.0
    assert close(exact(queries), want, tolerance)
    its.check_kept(keys, values, tolerance)


@EACH_SET
@pytest.mark.parametrize(("head_dim", "turning"), [(32, 2), (64, 16), (256, 64), (128, 96)])
@pytest.mark.parametrize("norms", [True, False])
def test_only_the_first_dimensions_turn_where_the_angles_are_fewer(
    instruction_set: str, head_dim: int, turning: int, norms: bool
) -> None:
    its = Projection(CpuWorkers(2, instruction_set), head_dim=head_dim)
    angles = rope_angles(its.rows, table(turning), its.workers)
    _, queries = its.run(angles=angles, **({} if norms else {"norms": None}))
    mx.eval(queries)
    *heads, values = its.expected(norms=norms, rope=False)
    places = turns(positions(SEGMENTS), turning, BASE, 1.0)
    want, keys = (
        np.concatenate([turned(x[..., :turning], places), x[..., turning:]], axis=-1) for x in heads
    )
    assert close(exact(queries), want, TOLERANCE)
    its.check_kept(keys, values, TOLERANCE)


@pytest.mark.parametrize(("norms", "rope"), [(True, True), (False, True), (False, False)])
def test_heads_in_bfloat16_are_computed_in_float32_and_rounded_once(
    norms: bool, rope: bool
) -> None:
    its = Projection(CpuWorkers(2))
    its.queries, its.keys, its.values = (
        x.astype(mx.bfloat16) for x in (its.queries, its.keys, its.values)
    )
    absent: dict[str, Any] = {} if norms else {"norms": None}
    absent |= {} if rope else {"angles": None}
    _, queries = its.run(**absent)
    other = Projection(CpuWorkers(1))
    _, exactly = other.run(**absent | {n: x.astype(mx.float32) for n, x in its.heads.items()})
    mx.eval(queries, exactly)
    assert same_bits(queries, exactly.astype(mx.bfloat16))
    assert its.paged.snapshot() == other.paged.snapshot()


def test_nothing_else_is_written() -> None:
    its = Projection(CpuWorkers(3))
    for sequence in range(3):
        for region in range(4):
            its.paged.memory(sequence, region)[:] = 0xA5
    before = {(s, r): its.paged.bits(s, r).copy() for s in range(3) for r in range(4)}
    mx.eval(its.run())
    for (sequence, region), bits in before.items():
        now = its.paged.bits(sequence, region)
        changed = np.unique(np.nonzero(now != bits)[0])
        _, start, count = next(segment for segment in SEGMENTS if segment[0] == sequence)
        mine = region in (KEY_REGION, VALUE_REGION)
        assert np.array_equal(changed, np.arange(start, start + count) if mine else [])


@EACH_SET
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    instruction_set: str,
) -> None:
    its = Projection(CpuWorkers(1, instruction_set))
    token, queries = its.run()
    mx.eval(token, queries)
    kept = its.paged.snapshot()
    for threads in (2, 5):
        other = Projection(CpuWorkers(threads, instruction_set))
        its_token, its_queries = other.run()
        mx.eval(its_token)
        assert same_bits(its_queries, queries)
        assert other.paged.snapshot() == kept
    other = Projection(CpuWorkers(2, instruction_set))
    for row in range(0, 44, 11):
        places = positions(SEGMENTS)
        sequence = 1 if row < 40 else 0
        rows = other.paged.rows((sequence, int(places[row]), 1))
        one = slice(row, row + 1)
        _, alone = other.run(
            queries=other.queries[one],
            keys=other.keys[one],
            values=other.values[one],
            angles=rope_angles(rows, table(32), other.workers),
            rows=rows,
        )
        assert same_bits(alone, queries[row : row + 1])


def test_a_row_that_is_no_number_stays_alone() -> None:
    its = Projection(CpuWorkers(2))
    _, want = its.run()
    mx.eval(want)
    ill = mx.array(its.queries)
    ill[5] = np.nan
    _, got = its.run(queries=ill)
    others = mx.array([row for row in range(44) if row != 5])
    assert same_bits(got[others], want[others])
    assert mx.all(mx.isnan(got[5])).item()


def test_all_may_have_any_strides() -> None:
    its = Projection(CpuWorkers(2))
    _, want = its.run()
    _, got = its.run(
        queries=mx.contiguous(its.queries.T).T,
        keys=mx.contiguous(its.keys[::-1])[::-1],
        values=mx.repeat(its.values, 2, axis=2)[..., ::2],
        norms=(
            mx.repeat(its.weights[0], 2)[::2],
            mx.contiguous(its.weights[1][::-1])[::-1],
            EPS,
        ),
        angles=mx.contiguous(its.angles.T).T,
    )
    assert same_bits(got, want)


def test_the_token_is_as_it_was_and_what_reads_it_comes_behind() -> None:
    its = Projection(CpuWorkers(1))
    first = mx.array([7], dtype=mx.int32)
    token, queries = its.run(token=first)
    assert its.paged.heap.committed_bytes == 0, "nothing is written before evaluation"
    mx.eval(token)
    assert its.paged.heap.committed_bytes > 0
    assert (token.shape, token.dtype, token.item()) == ((1,), mx.int32, 7)
    mx.eval(queries)


# --- angles --------------------------------------------------------------------------------------


@EACH_SET
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [2, 32, 128])
def test_angles_are_exact_to_the_last_bit_but_one(
    instruction_set: str, head_dim: int, base: float, scale: float
) -> None:
    rows = PagedLayer((40, 200, 90)).rows(*SEGMENTS)
    workers = CpuWorkers(2, instruction_set)
    angles = rope_angles(rows, table(head_dim, base, scale), workers)
    want = turns(positions(SEGMENTS), head_dim, base, scale)
    both = np.concatenate([np.cos(want), np.sin(want)], axis=1)
    assert (angles.shape, angles.dtype) == ((44, head_dim), mx.float32)
    np.testing.assert_allclose(exact(angles), both, atol=1.2e-7)
    longer = rope_angles(rows, table(head_dim, base, scale, magnitude=1.5), workers)
    np.testing.assert_allclose(exact(longer), 1.5 * both, atol=1.8e-7)


def test_angles_far_out_are_as_exact_as_near_by() -> None:
    paged = PagedLayer((40_000,), kv_heads=1)
    angles = rope_angles(paged.rows((0, 39_990, 10)), table(64, 1e6), CpuWorkers(1))
    want = turns(np.arange(39_990, 40_000), 64, 1e6, 1.0)
    np.testing.assert_allclose(exact(angles)[:, :32], np.cos(want), atol=1.2e-7)


@pytest.mark.parametrize(
    ("frequencies", "magnitude", "message"),
    [
        ([], 1.0, "1 to 128 of them"),
        ([1.0] * 129, 1.0, "1 to 128 of them"),
        ([1.0, np.inf], 1.0, "frequencies must be numbers"),
        ([np.nan], 1.0, "frequencies must be numbers"),
        ([1.0], 0.0, "magnitude must be a positive number"),
        ([1.0], -1.0, "magnitude must be a positive number"),
        ([1.0], np.inf, "magnitude must be a positive number"),
        ([1.0], np.nan, "magnitude must be a positive number"),
    ],
)
def test_threat_20_frequencies_that_are_none_are_refused(
    frequencies: list[float], magnitude: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RopeTable(frequencies, magnitude)


def test_a_row_in_a_block_of_others_is_refused() -> None:
    its = Projection(CpuWorkers(1))
    shared = AddressRange.sparse(its.paged.shape.geometry())
    shared.map(its.paged.heap, 0, 0, 1, writable=False)
    rows = RowTable([(shared, 2, 1)])
    angles = rope_angles(rows, table(32), its.workers)
    with pytest.raises(IndexError, match="read-only"):
        its.run(**{name: x[:1] for name, x in its.heads.items()}, rows=rows, angles=angles)
