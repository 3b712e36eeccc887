"""Weights are packed as they are, or refused; and rows are unpacked again."""

import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    CpuWorkers,
    PackedLinear,
    instruction_sets,
    linear,
    packed_bytes,
    packed_rows,
)
from tests.metal_ext.layers import exact, normal
from tests.metal_ext.packed import KINDS, MXFP4, Codes, Joined, Kind, part
from tests.metal_ext.programs import output_of

WORKERS = CpuWorkers(2)
PANEL = 16


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_is_unpacked_as_it_was(kind: Kind, instruction_set: str) -> None:
    workers = CpuWorkers(3, instruction_set)
    for outputs, inputs in ((1, 128), (37, 384), (50, 256)):
        joined = Joined([part(outputs, inputs, kind)], workers)
        ids = np.random.default_rng(0).integers(0, outputs, 70)
        rows = packed_rows(mx.array(ids, mx.int32), joined.packed, workers)
        assert (rows.shape, rows.dtype) == ((70, inputs), mx.float32)
        if kind.bits and kind != MXFP4:
            error = np.abs(exact(rows) - joined.numbers[ids])
            assert (error <= 1e-6 * joined.magnitudes[ids]).all()
        else:
            assert np.array_equal(exact(rows), joined.numbers[ids])


@pytest.mark.parametrize("inputs", [1, 31, 33, 100])
@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_numbers_may_have_any_count_of_inputs(kind: Kind, inputs: int) -> None:
    joined = Joined([part(5, inputs, kind)], WORKERS)
    rows = packed_rows(mx.arange(5), joined.packed, WORKERS)
    assert np.array_equal(exact(rows), joined.numbers)
    assert (joined.packed.outputs, joined.packed.inputs) == (5, inputs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parts_stand_one_behind_the_other(kind: Kind) -> None:
    parts = [part(outputs, 128, kind, seed) for seed, outputs in enumerate((PANEL - 1, 40, 1, 5))]
    packed = Joined(parts, WORKERS).packed
    assert (packed.outputs, packed.inputs) == (PANEL + 45, 128)
    rows = packed_rows(mx.arange(packed.outputs), packed, WORKERS)
    alone = [
        packed_rows(mx.arange(len(its.numbers)), Joined([its], WORKERS).packed, WORKERS)
        for its in parts
    ]
    assert mx.array_equal(rows, mx.concatenate(alone)).item()
    assert packed.nbytes == 4 * Joined([parts[-1]], WORKERS).packed.nbytes, "61 outputs, 4 panels"


def test_panels_and_steps_of_inputs_are_filled_up() -> None:
    def nbytes(outputs: int, inputs: int, kind: Kind) -> int:
        return Joined([part(outputs, inputs, kind)], WORKERS).packed.nbytes

    full = PANEL * 64
    for outputs, inputs in ((1, 33), (PANEL, 64)):
        assert nbytes(outputs, inputs, Kind(mx.float32)) == 4 * full
        assert nbytes(outputs, inputs, Kind(mx.float16)) == 4 * full, "kept as float32"
        assert nbytes(outputs, inputs, Kind(mx.bfloat16)) == 2 * full
    assert nbytes(1, 64, Kind(mx.bfloat16, 4, 32)) == full // 2 + PANEL * 2 * 2 * 2
    assert nbytes(1, 64, Kind(mx.float32, 8, 64)) == full + PANEL * 2 * 4
    assert nbytes(1, 64, Kind(mx.float16, 8, 64)) == full + PANEL * 2 * 4
    assert 8 * nbytes(1, 64, MXFP4) == 4.25 * full


def test_weights_may_have_any_strides_and_need_not_be_computed_yet() -> None:
    plain = normal((20, 40), mx.bfloat16)
    for weight in (
        mx.contiguous(plain.T).T,
        mx.contiguous(plain[::-1, ::-1])[::-1, ::-1],
        mx.pad(plain, [(1, 2), (3, 4)])[1:-2, 3:-4],
        plain + 0,
    ):
        rows = packed_rows(mx.arange(20), PackedLinear([weight], WORKERS, []), WORKERS)
        assert mx.array_equal(rows, plain.astype(mx.float32)).item()


def test_ids_may_be_any_int32_array_of_one_dimension() -> None:
    joined = Joined([part(9, 32)], WORKERS)
    ids = mx.array([[3, 8, 0], [3, 3, 1]], mx.int32)
    rows = packed_rows(ids.T[1], joined.packed, WORKERS)
    assert np.array_equal(exact(rows), joined.numbers[[8, 3]])
    for wrong in (ids, mx.array([1.0]), mx.array([1], mx.uint32), mx.array(1, mx.int32)):
        with pytest.raises(ValueError, match=r"ids must be int32 \[T\]"):
            packed_rows(wrong, joined.packed, WORKERS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threat_20_the_row_of_an_id_that_is_none_is_not_a_number(kind: Kind) -> None:
    # 37 outputs fill two panels of 16 and a part of a third, whose rest is zero.
    joined = Joined([part(37, 128, kind)], WORKERS)
    last = 2**31 - 1
    ids = [36, 37, 0, -1, 47, 48, 4000, last, -last - 1, 36]
    rows = exact(packed_rows(mx.array(ids, mx.int32), joined.packed, WORKERS))
    good = [id in (0, 36) for id in ids]
    assert np.isnan(rows).all(axis=1).tolist() == [not right for right in good]
    alone = packed_rows(mx.array([36, 0, 36], mx.int32), joined.packed, WORKERS)
    assert np.array_equal(rows[good], exact(alone))


def test_a_result_that_there_is_no_memory_for_is_an_error() -> None:
    says = output_of(
        """
        import resource
        import metal_ext, mlx.core as mx
        from metal_ext import CpuWorkers, PackedLinear, packed_rows
        workers = CpuWorkers(1)
        packed = PackedLinear([mx.zeros((1, 4096))], workers, [])
        mx.eval(packed_rows(mx.zeros((1,), mx.int32), packed, workers))
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        try:
            mx.eval(packed_rows(mx.zeros((2**18,), mx.int32), packed, workers))
        except RuntimeError as error:
            print(error)
        """
    )
    assert says == "the system has no memory for a result of 4294967296 bytes"


def test_a_queued_product_keeps_its_weights_alive() -> None:
    joined = Joined([part(40, 64)], CpuWorkers(2))
    x = normal((3, 64), mx.float32)
    want = joined.expected(exact(x))
    queued = linear(x, joined.packed, CpuWorkers(2))
    rows = packed_rows(mx.array([39]), joined.packed, CpuWorkers(1))
    last = joined.numbers[39]
    del joined, x
    gc.collect()
    np.testing.assert_allclose(exact(queued), want, atol=1e-3)
    assert np.array_equal(exact(rows)[0], last)


# --- what is refused -----------------------------------------------------------------------------


def codes(bits: int = 4, group: int = 32, inputs: int = 128) -> tuple[mx.array, Codes]:
    """Words of 16 outputs, with scales and biases for them."""
    words = mx.zeros((16, inputs * bits // 32), mx.uint32)
    scales = mx.ones((16, inputs // group))
    return words, (scales, scales, bits, group)


WORDS, GOOD = codes()
SCALES = mx.ones((16, 4))
EXPONENTS = mx.zeros((16, 4), mx.uint8)
NUMBERS = mx.zeros((16, 128))
NUMBER = mx.zeros((1, 1))
Made = tuple[list[mx.array], list[Codes | None]]
REFUSED: list[tuple[str, Made, str]] = [
    ("no weights", ([], []), "it has no weights"),
    ("codes for one of two", ([WORDS, WORDS], [GOOD]), "codes for every weight, or for none"),
    ("codes for nobody", ([], [GOOD]), "it has no weights"),
    ("one dimension", ([mx.zeros((128,))], []), r"is not \[outputs, inputs\]"),
    ("three dimensions", ([mx.zeros((1, 16, 128))], []), r"is not \[outputs, inputs\]"),
    ("no outputs", ([mx.zeros((0, 128))], []), r"is not \[outputs, inputs\]"),
    ("no inputs", ([mx.zeros((16, 0))], []), r"is not \[outputs, inputs\]"),
    ("whole numbers", ([mx.zeros((16, 128), mx.int32)], []), "neither float32 nor bfloat16"),
    ("words without codes", ([WORDS], []), "neither float32 nor bfloat16"),
    ("codes that are no words", ([NUMBERS], [GOOD]), "codes are uint32 words"),
    ("seven bits", ([WORDS], [(SCALES, SCALES, 7, 32)]), "1 to 6 or 8 bits, not 7"),
    ("sixteen bits", ([WORDS], [(SCALES, SCALES, 16, 32)]), "1 to 6 or 8 bits, not 16"),
    ("no bits", ([WORDS], [(SCALES, SCALES, 0, 32)]), "1 to 6 or 8 bits, not 0"),
    ("negative bits", ([WORDS], [(SCALES, SCALES, -4, 32)]), "1 to 6 or 8 bits, not -4"),
    ("groups of 16", ([WORDS], [(SCALES, SCALES, 4, 16)]), "32, 64 or 128 inputs, not 16"),
    ("groups of 0", ([WORDS], [(SCALES, SCALES, 4, 0)]), "32, 64 or 128 inputs, not 0"),
    ("negative groups", ([WORDS], [(SCALES, SCALES, 4, -32)]), "inputs, not -32"),
    ("other groups", ([WORDS], [(SCALES, SCALES, 4, 64)]), "do not fit its codes"),
    ("other bits", ([WORDS], [(SCALES, SCALES, 8, 32)]), "do not fit its codes"),
    ("half a group", ([WORDS[:, :6]], [(SCALES[:, :1],) * 2 + (4, 32)]), "no whole groups"),
    ("half a code", ([WORDS], [(SCALES[:, :5],) * 2 + (3, 32)]), "no whole groups"),
    ("too few scales", ([WORDS], [(SCALES[:8], SCALES, 4, 32)]), "do not fit its codes"),
    ("too few biases", ([WORDS], [(SCALES, SCALES[:, :2], 4, 32)]), "do not fit its codes"),
    ("no biases", ([WORDS], [(SCALES, None, 4, 32)]), "do not fit its codes"),
    ("biases of exponents", ([WORDS], [(EXPONENTS,) * 2 + (4, 32)]), "do not fit its codes"),
    ("eight bits with exponents", ([WORDS], [(EXPONENTS, None, 8, 32)]), "floats of 4 bits"),
    ("exponents of 64", ([WORDS], [(EXPONENTS[:, :2], None, 4, 64)]), "floats of 4 bits"),
    (
        "biases of another kind",
        ([WORDS], [(SCALES, SCALES.astype(mx.bfloat16), 4, 32)]),
        "do not fit its codes",
    ),
    ("other inputs", ([NUMBERS, NUMBERS[:, :64]], []), "parts differ in inputs"),
    ("other inputs of codes", ([NUMBERS[:, :64], WORDS], [None, GOOD]), "parts differ in inputs"),
]


@pytest.mark.parametrize(
    ("made", "message"), [pytest.param(made, message, id=name) for name, made, message in REFUSED]
)
def test_what_cannot_be_packed_is_refused(made: Made, message: str) -> None:
    weights, its_codes = made
    with pytest.raises(ValueError, match=message) as caught:
        PackedLinear(weights, WORKERS, its_codes)
    assert str(caught.value).startswith("a linear layer cannot be packed: ")
    assert PackedLinear([WORDS], WORKERS, [GOOD]).outputs == 16


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([mx.broadcast_to(NUMBER, (2**30, 1))] * 2, IndexError, "outputs is 2147483648"),
        ([mx.broadcast_to(NUMBER, (2**31 - 1, 2**31 - 1))], ValueError, "more than 2.46 bytes"),
    ],
)
def test_a_layer_larger_than_any_array_is_refused_before_it_has_memory(
    weights: list[mx.array], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PackedLinear(weights, WORKERS, [])


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32])
def test_scales_that_are_no_floats_are_refused(dtype: mx.Dtype) -> None:
    scales = SCALES.astype(dtype)
    with pytest.raises(ValueError, match="a linear layer cannot be packed"):
        PackedLinear([WORDS], WORKERS, [(scales, scales, 4, 32)])


@pytest.mark.parametrize(
    "call",
    [
        lambda: PackedLinear(3, WORKERS, []),  # type: ignore[arg-type]
        lambda: PackedLinear([NUMBERS], None, []),  # type: ignore[arg-type]
        lambda: PackedLinear([WORDS], WORKERS, [GOOD[:3]]),  # type: ignore[list-item]
        lambda: PackedLinear([WORDS], WORKERS, [(SCALES, SCALES, 4.5, 32)]),  # type: ignore[list-item]
    ],
)
def test_what_is_of_another_type_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


# --- sizes before there are weights --------------------------------------------------------------

# A matrix of each, as it is stored and as packed_bytes() is told.
SIZED = [(part(7 * number + 3, 384, kind), kind) for number, kind in enumerate(KINDS)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bytes_are_known_before_there_are_weights(count: int) -> None:
    for first in range(len(SIZED) - count + 1):
        parts = SIZED[first : first + count]
        kinds = [(len(its.numbers), kind.dtype, kind.bits, kind.group) for its, kind in parts]
        assert packed_bytes(384, kinds) == Joined([its for its, _ in parts], WORKERS).packed.nbytes


def test_sizes_that_cannot_be_are_refused() -> None:
    for inputs, kind, error in (
        (0, (1, mx.float32, 0, 0), IndexError),
        (2**31, (1, mx.float32, 0, 0), IndexError),
        (1, (0, mx.float32, 0, 0), IndexError),
        (1, (2**80, mx.float32, 0, 0), IndexError),
        (2**31 - 1, (2**31 - 1, mx.float32, 0, 0), ValueError),
        (33, (1, mx.float32, 4, 32), ValueError),
        (64, (1, mx.uint8, 0, 0), ValueError),
    ):
        with pytest.raises(error):
            packed_bytes(inputs, [kind])
    with pytest.raises(ValueError, match="it has no weights"):
        packed_bytes(1, [])
