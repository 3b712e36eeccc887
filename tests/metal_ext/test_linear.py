"""Products of packed layers, and what a model does between them, against float64."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    CpuWorkers,
    PackedLinear,
    gated_mlp,
    instruction_sets,
    linear,
    linear_heads,
    rms_norm,
)
from tests.metal_ext.layers import Floats, exact, normal, same_bits
from tests.metal_ext.packed import (
    FLOAT32_TOLERANCE,
    KINDS,
    MXFP4,
    PLAIN,
    Joined,
    Kind,
    gated,
    layer,
    normed,
    part,
)

EPS = 1e-6
# 256 rows go at a time.
ROWS = (1, 7, 256, 257, 600)
EACH_SET = pytest.mark.parametrize("instruction_set", instruction_sets())
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


def odd_shapes(kind: Kind) -> list[tuple[int, int]]:
    """Outputs and inputs."""
    return [(1, 128), (37, 384), (130, 256)] if kind.bits else [(1, 1), (37, 100), (130, 353)]


def close(got: mx.array, want: Floats, tolerance: Floats) -> bool:
    """Whether all numbers are within their own tolerance."""
    assert got.shape == want.shape
    assert got.dtype == mx.float32
    return bool((np.abs(exact(got) - want) <= tolerance).all())


@EACH_SET
@pytest.mark.parametrize("activations", ["bfloat16", "int8"])
def test_a_layer_that_is_exact_is_never_multiplied_with_rounded_numbers(
    instruction_set: str, activations: str
) -> None:
    plain = CpuWorkers(2, instruction_set)
    rounding = CpuWorkers(2, instruction_set, activations)
    weight = normal((48, 128), mx.bfloat16, 1)
    codes, scales, biases = mx.quantize(weight, 64, 4)
    x = normal((3, 128), mx.float32, 2)
    for stored, its in ((weight, None), (codes, (scales, biases, 4, 64))):
        wanted = linear(x, PackedLinear([stored], plain, [its]), plain)
        router = PackedLinear([stored], rounding, [its], exact=True)
        assert same_bits(linear(x, router, rounding), wanted)


def test_what_numbers_may_be_rounded_to_has_three_names() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16 or int8, not 'fp8'"):
        CpuWorkers(1, "auto", "fp8")


@EACH_SET
@EACH_KIND
def test_a_product_is_the_exact_one(kind: Kind, instruction_set: str) -> None:
    workers = CpuWorkers(2, instruction_set)
    for outputs, inputs in odd_shapes(kind):
        its = layer(outputs, inputs, kind, workers)
        for rows in ROWS if inputs == 100 or inputs == 384 else ROWS[:2]:
            x = normal((rows, inputs), mx.float32, rows)
            got = linear(x, its.packed, workers)
            assert close(got, its.expected(exact(x)), its.tolerance(exact(x))), (outputs, rows)


@EACH_SET
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
@pytest.mark.parametrize("norms", [False, True], ids=["as it is", "after a norm"])
def test_a_norm_goes_before_and_a_residual_behind(
    instruction_set: str, norms: bool, adds: bool
) -> None:
    workers = CpuWorkers(2, instruction_set)
    its = layer(37, 100, Kind(mx.bfloat16), workers)
    weight = 1 + 0.2 * normal((100,), mx.float32, 5)
    for rows in (1, 7, 300):
        x, residual = 3 * normal((rows, 100), mx.float32, 3), normal((rows, 37), mx.float32, 4)
        got = linear(
            x,
            its.packed,
            workers,
            norm=weight if norms else None,
            eps=EPS,
            residual=residual if adds else None,
        )
        multiplied = normed(exact(x), exact(weight), EPS) if norms else exact(x)
        want = its.expected(multiplied) + (exact(residual) if adds else 0)
        assert close(got, want, 1.1 * its.tolerance(multiplied))


def test_eps_matters_where_rows_are_small() -> None:
    workers = CpuWorkers(1)
    its, weight = layer(5, 32, PLAIN, workers), mx.ones((32,))
    x = normal((2, 32), mx.float32) * 1e-3
    for eps in (1e-6, 1e-2):
        got = linear(x, its.packed, workers, norm=weight, eps=eps)
        row = normed(exact(x), np.ones(32), eps)
        assert close(got, its.expected(row), its.tolerance(row))
        assert close(rms_norm(x, weight, eps, workers), row, FLOAT32_TOLERANCE * np.abs(row))


@pytest.mark.parametrize("shape", [(6, 4, 25), (6, 2, 2, 25), (6, 100, 1), (6, 1, 100)])
def test_a_row_may_have_more_than_one_dimension(shape: tuple[int, ...]) -> None:
    workers = CpuWorkers(2)
    its = layer(9, 100, PLAIN, workers)
    x, residual = normal((6, 100), mx.float32), normal((6, 9), mx.float32, 1)
    norm = mx.ones((100,))
    want = linear(x, its.packed, workers, norm=norm, eps=EPS, residual=residual)
    wide = linear(
        x.reshape(shape), its.packed, workers, norm=norm, eps=EPS, residual=residual[:, :, None]
    )
    assert same_bits(wide, want)
    assert close(linear(x.reshape(shape), its.packed, workers), *product(its, x))


@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("heads", [[4, 1, 1], [6], [1, 2, 3], [2, 2, 2]], ids=str)
def test_heads_are_the_parts_of_a_product(heads: list[int], rows: int) -> None:
    workers = CpuWorkers(2)
    its = layer(6 * 8, 40, PLAIN, workers)
    x, norm, residual = (normal(shape, mx.float32) for shape in ((rows, 40), (40,), (rows, 48)))
    whole = linear(x, its.packed, workers, norm=norm, eps=EPS, residual=residual)
    got = linear_heads(x, its.packed, workers, heads, norm=norm, eps=EPS, residual=residual)
    assert [part.shape for part in got] == [(rows, count, 8) for count in heads]
    # Each is there without the others, and may be read in any way.
    begin = 0
    for its_part, count in zip(got, heads, strict=True):
        expected = whole[:, begin : begin + 8 * count]
        assert same_bits(mx.contiguous(its_part).reshape(rows, -1), expected)
        assert same_bits((its_part + 0.0).reshape(rows, -1), expected)
        assert same_bits(its_part[-1:].reshape(1, -1), expected[-1:])
        begin += 8 * count


def test_heads_outlive_the_others_of_their_product() -> None:
    workers = CpuWorkers(2)
    its = layer(6 * 8, 40, PLAIN, workers)
    x = normal((3, 40), mx.float32)
    kept = linear_heads(x, its.packed, workers, [4, 1, 1])[1]
    mx.eval(kept)
    for number in range(50):
        mx.eval(normal((3, 48), mx.float32, number))
    assert same_bits(kept.reshape(3, 8), linear(x, its.packed, workers)[:, 32:40])


def product(its: Joined, x: mx.array) -> tuple[Floats, Floats]:
    """What x times the layer must be, and how exactly."""
    return its.expected(exact(x)), its.tolerance(exact(x))


@pytest.mark.parametrize("are_evaluated", [False, True])
def test_rows_weights_and_residual_may_have_any_strides(are_evaluated: bool) -> None:
    workers = CpuWorkers(2)
    its = layer(20, 40, PLAIN, workers)
    x, norm, residual = (normal(shape, mx.float32) for shape in ((7, 40), (40,), (7, 20)))
    want = linear(x, its.packed, workers, norm=norm, eps=EPS, residual=residual)
    x = mx.contiguous(x.T).T
    norm = mx.repeat(norm, 2)[::2]
    residual = mx.pad(residual, [(1, 1), (2, 3)])[1:-1, 2:-3]
    if are_evaluated:
        mx.eval(x, norm, residual)
    got = linear(x, its.packed, workers, norm=norm, eps=EPS, residual=residual)
    assert same_bits(got, want)


def test_rows_may_be_the_heads_of_another_product() -> None:
    workers = CpuWorkers(2)
    first, second = layer(48, 40, PLAIN, workers), layer(20, 16, PLAIN, workers, 1)
    x = normal((7, 40), mx.float32)
    _, heads, _ = linear_heads(x, first.packed, workers, [3, 2, 1])
    want = linear(linear(x, first.packed, workers)[:, 24:40], second.packed, workers)
    assert same_bits(linear(heads, second.packed, workers), want)


@EACH_SET
@EACH_KIND
def test_several_weights_joined_are_the_products_of_each(kind: Kind, instruction_set: str) -> None:
    workers = CpuWorkers(2, instruction_set)
    parts = [part(outputs, 256, kind, seed) for seed, outputs in enumerate((48, 16, 21))]
    x = normal((9, 256), mx.float32, 7)
    together = linear(x, Joined(parts, workers).packed, workers)
    alone = [linear(x, Joined([each], workers).packed, workers) for each in parts]
    assert same_bits(together, mx.concatenate(alone, axis=1))


# --- the same bits -------------------------------------------------------------------------------


@EACH_SET
@EACH_KIND
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    kind: Kind, instruction_set: str
) -> None:
    one = CpuWorkers(1, instruction_set)
    inputs = 384 if kind.bits else 300
    its = layer(150, inputs, kind, one)
    x, weight = normal((300, inputs), mx.float32), normal((inputs,), mx.float32, 1)

    def run(rows: mx.array, workers: CpuWorkers) -> mx.array:
        return linear(rows, its.packed, workers, norm=weight, eps=EPS)

    whole = run(x, one)
    assert same_bits(run(x, CpuWorkers(2, instruction_set)), whole)
    assert same_bits(run(x, CpuWorkers(5, instruction_set)), whole)
    cuts = (0, 1, 3, 12, 45, 301)
    pieces = [run(x[a:b], one) for a, b in itertools.pairwise(cuts)]
    assert same_bits(mx.concatenate(pieces), whole)
    assert same_bits(run(x[::-1], CpuWorkers(3, instruction_set)), whole[::-1])


@EACH_SET
@pytest.mark.parametrize("activations", ["float32", "bfloat16", "int8"])
def test_mxfp4_has_the_bits_of_the_same_numbers_in_8_bits(
    instruction_set: str, activations: str
) -> None:
    workers = CpuWorkers(2, instruction_set, activations)
    its = part(150, 384, MXFP4)
    assert its.codes is not None
    scales = 2.0 ** (its.codes[0].astype(mx.float32) - 128)
    halves = its.numbers / np.repeat(exact(scales), 32, axis=1)
    words = mx.array((halves + 12).astype(np.uint8).view(np.uint32))
    scales, biases = scales.astype(mx.bfloat16), (-12 * scales).astype(mx.bfloat16)
    eight = PackedLinear([words], workers, [(scales, biases, 8, 32)])
    four = Joined([its], workers).packed
    for rows in (1, 2, 3, 8, 40):
        x = normal((rows, 384), mx.float32, rows)
        assert same_bits(linear(x, four, workers), linear(x, eight, workers))


@EACH_SET
def test_a_whole_mlp_has_the_same_bits_in_any_company(instruction_set: str) -> None:
    one = CpuWorkers(1, instruction_set)
    both, down = layer(2 * 96, 80, PLAIN, one), layer(80, 96, PLAIN, one)
    x, weight = normal((300, 80), mx.float32), normal((80,), mx.float32, 1)

    def run(rows: mx.array, threads: int) -> mx.array:
        workers = CpuWorkers(threads, instruction_set)
        return gated_mlp(rows, weight, EPS, both.packed, down.packed, workers)

    whole = run(x, 1)
    assert same_bits(run(x, 3), whole)
    assert same_bits(mx.concatenate([run(x[:1], 1), run(x[1:40], 2), run(x[40:], 1)]), whole)


@EACH_SET
@EACH_KIND
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(kind: Kind, instruction_set: str, bad: float) -> None:
    workers = CpuWorkers(2, instruction_set)
    inputs = 256 if kind.bits else 100
    its = layer(37, inputs, kind, workers)
    for rows in (3, 40):
        x = normal((rows, inputs), mx.float32)
        ill = mx.array(x)
        ill[1, 5] = bad
        want, got = linear(x, its.packed, workers), linear(ill, its.packed, workers)
        others = mx.array([row for row in range(rows) if row != 1])
        assert same_bits(got[others], want[others])
        assert not mx.any(mx.isfinite(got[1])).item()


# --- a whole MLP, and a norm ---------------------------------------------------------------------


@EACH_SET
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3], KINDS[7]], ids=str)
def test_an_mlp_is_the_exact_one(kind: Kind, instruction_set: str) -> None:
    workers = CpuWorkers(2, instruction_set)
    hidden, inner = (128, 192) if kind.bits else (70, 48)
    parts = [part(inner, hidden, kind, seed) for seed in (1, 2)]
    both = Joined(parts, workers)
    down = layer(hidden, inner, kind, workers, 3)
    weight = 1 + 0.2 * normal((hidden,), mx.float32, 4)
    for rows in (1, 7, 257):
        x = normal((rows, hidden), mx.float32, 5)
        got = gated_mlp(x, weight, EPS, both.packed, down.packed, workers)
        row = normed(exact(x), exact(weight), EPS)
        inside = gated(both.expected(row))
        # An error of gate or up is passed on by the other one, and by SiLU's slope, 1.1 at most.
        gate, up = np.split(np.abs(both.expected(row)), 2, axis=1)
        gate_off, up_off = np.split(both.tolerance(row), 2, axis=1)
        off = 1.1 * (gate_off * up + up_off * gate) + FLOAT32_TOLERANCE * np.abs(inside)
        tolerance = down.tolerance(inside) + off @ down.magnitudes.T + 1e-6
        assert close(got, exact(x) + down.expected(inside), tolerance)


@EACH_SET
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_silu"])
def test_an_mlp_has_any_gate_with_x_or_without(gate: str, instruction_set: str) -> None:
    workers = CpuWorkers(2, instruction_set)
    both = Joined([part(48, 70, PLAIN, seed) for seed in (1, 2)], workers)
    down, weight = layer(70, 48, PLAIN, workers, 3), mx.full((70,), 4.0)
    x = normal((7, 70), mx.float32, 5)
    want = down.expected(gated(both.expected(normed(exact(x), exact(weight), EPS)), gate))
    for adds in (True, False):
        got = gated_mlp(x, weight, EPS, both.packed, down.packed, workers, gate=gate, adds=adds)
        assert np.abs(exact(got) - adds * exact(x) - want).max() < 1e-5 * np.abs(want).max()


@EACH_SET
def test_gates_far_from_zero_neither_overflow_nor_vanish(instruction_set: str) -> None:
    workers = CpuWorkers(1, instruction_set)
    gates = [-1e30, -200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 200.0, 1e30] + [0.0] * 7
    both = np.zeros((32, 16), np.float32)
    both[:16, 0] = gates
    both[16:, 0] = 1.0
    packed = PackedLinear([mx.array(both)], workers, [])
    down = PackedLinear([mx.eye(16)], workers, [])
    x = mx.zeros((1, 16))
    x[0, 0] = 1.0
    # The norm of the first number alone is 4, of which the weight makes 1.
    got = gated_mlp(x, mx.full((16,), 0.25), 0.0, packed, down, workers) - x
    want = np.array([g / (1 + np.exp(-g)) if g > -700 else 0.0 for g in gates])
    assert mx.all(mx.isfinite(got)).item()
    np.testing.assert_allclose(exact(got)[0], want, rtol=1e-4, atol=1e-6)


@EACH_SET
@pytest.mark.parametrize("numbers", [1, 7, 16, 100, 1025])
def test_a_norm_is_the_exact_one(instruction_set: str, numbers: int) -> None:
    workers = CpuWorkers(2, instruction_set)
    x, weight = normal((9, numbers), mx.float32), normal((numbers,), mx.float32, 1)
    want = normed(exact(x), exact(weight), EPS)
    got = rms_norm(x, weight, EPS, workers)
    assert same_bits(rms_norm(x, weight, EPS, workers, residual=x), x + got)
    assert close(got, want, FLOAT32_TOLERANCE * np.abs(want))
    assert same_bits(rms_norm(x[3:4], weight, EPS, workers), got[3:4])
    assert same_bits(
        rms_norm(mx.contiguous(x.T).T, weight, EPS, CpuWorkers(1, instruction_set)), got
    )
