"""Products of a few rows in MLX's graph, against MLX's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.models.mlx_ops import GATED
from engine.models.spec import Gate
from metal_ext import StoredMatrix
from tests.metal.graph import _standin
from tests.metal.graph.stage import TOLERANCE

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PACKINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "affine4": {"bits": 4, "group_size": 64, "mode": "affine"},
    "affine8": {"bits": 8, "group_size": 32, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
INPUTS = 192


@dataclass(frozen=True, eq=False)
class Weights:
    """A random matrix, as it is stored and in float32."""

    stored: StoredMatrix
    numbers: mx.array
    bias: mx.array

    def product(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self.numbers.T + self.bias


def weights(packing: str, outputs: int, dtype: mx.Dtype, *, biased: bool = False) -> Weights:
    how, plain = PACKINGS[packing], mx.random.normal((outputs, INPUTS)) * INPUTS**-0.5
    parts = mx.quantize(plain.astype(dtype), **how) if how else (plain.astype(dtype),)
    bias = mx.random.normal((outputs,)).astype(dtype) if biased else None
    mx.eval(parts, bias)
    scales, biases = (*parts[1:], None, None)[:2]
    numbers = mx.dequantize(parts[0], scales, biases, **how, dtype=dtype) if how else parts[0]
    added = mx.zeros((outputs,)) if bias is None else bias.astype(mx.float32)
    stored = StoredMatrix(parts[0], scales, biases, bias, **how)
    return Weights(stored, numbers.astype(mx.float32), added)


def random_rows(count: int, dtype: mx.Dtype, width: int = INPUTS) -> mx.array:
    return mx.random.normal((count, width)).astype(dtype)


def check(found: mx.array, right: mx.array) -> None:
    off = mx.abs(found.astype(mx.float32) - right) / (1 + mx.abs(right))
    assert bool(off.max() <= TOLERANCE[found.dtype])


def commands(results: list[mx.array]) -> int:
    before = _standin.counts()["commands"]
    mx.eval(results)
    return _standin.counts()["commands"] - before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
def test_matrices_of_one_format_share_commands_and_a_row_has_the_same_bits_in_any_company(
    packing: str, dtype: mx.Dtype
) -> None:
    made = [weights(packing, n, dtype, biased=n < 9) for n in (24, 1, 5, 8, 40)]
    x, matrices = random_rows(9, dtype), [each.stored for each in made]
    together = metal_ext.multiply(x, matrices)
    assert commands(together) == 2  # of four matrices and of one
    for found, each in zip(together, made, strict=True):
        assert (found.dtype, found.shape) == (dtype, (9, len(each.bias)))
        check(found, each.product(x))
    for first, count in ((0, 1), (3, 1), (4, 2), (1, 3), (2, 7), (1, 8)):
        part = metal_ext.multiply(x[first : first + count], matrices)
        for few, all_rows in zip(part, together, strict=True):
            assert mx.array_equal(few, all_rows[first : first + count])


def test_matrices_of_two_formats_are_two_commands() -> None:
    made = [weights(packing, 8, mx.bfloat16) for packing in ("affine4", "affine8", "affine4")]
    x = random_rows(2, mx.bfloat16)
    found = metal_ext.multiply(x, [each.stored for each in made])
    assert commands(found) == 2
    for each, its in zip(made, found, strict=True):
        check(its, each.product(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_residual_is_added_to_the_rounded_product(dtype: mx.Dtype, biased: bool) -> None:
    matrix = weights("affine4", 13, dtype, biased=biased).stored
    x, residual = random_rows(3, dtype), random_rows(3, dtype, 26)[:, ::2]
    product, both = metal_ext.multiply(x, [matrix]), metal_ext.multiply(x, [matrix], residual)
    assert mx.array_equal(both[0], residual + product[0])
    assert _standin.calls("multiply").count("ordered_copy") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_silu"])
def test_a_gated_product_is_that_of_two_products(kind: str, packing: str, dtype: mx.Dtype) -> None:
    gate, up = (weights(packing, 30, dtype).stored for _ in "gu")
    for rows in (1, 2, 3, 8):
        x = random_rows(rows, dtype)
        found = metal_ext.multiply_gated(x, gate, up, kind=kind)
        assert commands([found]) == 1
        right = GATED[Gate(kind)](*metal_ext.multiply(x, [gate, up]))
        check(found, right.astype(mx.float32))


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_rows_that_are_not_aligned_are_copied_first(first: int) -> None:
    wide, each = random_rows(1, mx.float16, INPUTS + 8), weights("affine4", 8, mx.float16)
    mx.eval(wide)
    x = wide[:, first : first + INPUTS]
    mx.eval(x)
    found = metal_ext.multiply(x, [each.stored])[0]
    gated = metal_ext.multiply_gated(x, each.stored, each.stored)
    mx.eval(found, gated)
    check(found, each.product(x))
    for operation in ("multiply", "multiply_gated"):
        assert _standin.calls(operation).count("ordered_copy") == (first % 4 != 0)


def test_rows_and_weights_may_go_as_soon_as_the_graph_is_made() -> None:
    each, x = weights("affine4", 8, mx.float32), random_rows(2, mx.float32) + 0
    right = each.product(x)
    found = metal_ext.multiply(x * 1, [each.stored])
    del each, x
    mx.eval(found)
    check(found[0], right)
    _standin.settle()


ONE, CODES = mx.ones((8, 64)), mx.zeros((8, 8), mx.uint32)
SCALES, STACK, NINE = mx.ones((8, 1)), mx.ones((2, 8, 64)), mx.ones((9, 64))
BIAS = mx.ones((8,))
mx.eval(ONE, CODES, SCALES, STACK, NINE, BIAS)
WRONG_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "a vector": ({"weight": ONE[0]}, "a weight is"),
    "inputs": ({"weight": mx.ones((8, 40))}, "40 inputs"),
    "integers": ({"weight": ONE.astype(mx.int32)}, "the weight must be float32"),
    "bits": ({"weight": CODES, "bits": 3}, "codes of 3 bits"),
    "a group": ({"weight": CODES, "bits": 4, "group_size": 16}, "groups of 16"),
    "a mode": ({"weight": CODES, "bits": 4, "group_size": 32, "mode": "nvfp4"}, "mode nvfp4"),
    "MXFP4": ({"weight": CODES, "bits": 4, "group_size": 64, "mode": "mxfp4"}, "groups of 32"),
    "no scales": ({"weight": CODES, "bits": 4, "group_size": 64}, "do not fit its codes"),
    "a scale": ({"weight": ONE, "scales": SCALES}, "do not fit its codes"),
    "no biases": ({"weight": CODES, "scales": SCALES, "bits": 4, "group_size": 64}, "do not fit"),
    "parts of groups": ({"weight": CODES[:, :4] + 0, "scales": SCALES, "biases": SCALES,
                         "bits": 4, "group_size": 64}, "32 inputs in groups of 64"),
    "few scales": ({"weight": CODES, "scales": SCALES[1:], "biases": SCALES, "bits": 4,
                    "group_size": 64}, "scales has another shape"),
    "codes of bytes": ({"weight": CODES.view(mx.uint8), "scales": SCALES, "biases": SCALES,
                        "bits": 4, "group_size": 64}, "uint32 words"),
    "other biases": ({"weight": CODES, "scales": SCALES, "biases": SCALES.astype(mx.float16),
                      "bits": 4, "group_size": 64}, "biases has another type"),
    "exponents": ({"weight": CODES[:, :4] + 0, "scales": SCALES, "bits": 4,
                   "group_size": 32, "mode": "mxfp4"}, "scales of MXFP4"),
    "a bias": ({"weight": ONE, "bias": mx.ones((9,))}, "bias has another shape"),
    "order": ({"weight": mx.ones((64, 16)).T}, "the weight is not in row-major order"),
    "alignment": ({"weight": mx.ones((1, 72), mx.float16)[:, 4:68]}, "the weight is not aligned"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FORMATS)
def test_formats_without_kernels_are_refused(what: str) -> None:
    parts, words = WRONG_FORMATS[what]
    mx.eval([each for each in parts.values() if isinstance(each, mx.array)])
    with pytest.raises(ValueError, match=words):
        StoredMatrix(**parts)


def test_an_array_that_is_not_evaluated_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluated"):
        StoredMatrix(ONE + 1)


WRONG: dict[str, tuple[Callable[[StoredMatrix], object], str]] = {
    "columns": (lambda m: metal_ext.multiply(ONE[:, :32], [m]), r"x must be \[rows, 64\]"),
    "no rows": (lambda m: metal_ext.multiply(ONE[:0], [m]), r"x must be \[rows, 64\]"),
    "a type": (lambda m: metal_ext.multiply(ONE.astype(mx.float16), [m]), "different types"),
    "a stack": (lambda m: metal_ext.multiply(ONE, [StoredMatrix(STACK)]), "is no matrix"),
    "two residuals": (lambda m: metal_ext.multiply(ONE, [m, m], ONE), "of one matrix"),
    "a residual's shape": (lambda m: metal_ext.multiply(ONE, [m], ONE), "different shapes"),
    "a residual's type": (lambda m: metal_ext.multiply(ONE, [m], CODES), "different types"),
    "a gate": (lambda m: metal_ext.multiply_gated(ONE, m, m, kind="relu"), "relu"),
    "sizes": (lambda m: metal_ext.multiply_gated(ONE, m, StoredMatrix(NINE)), "different outputs"),
    "a format": (lambda m: metal_ext.multiply_gated(
        ONE, m, StoredMatrix(CODES, SCALES, SCALES, bits=4, group_size=64)), "or formats"),
    "a bias": (lambda m: metal_ext.multiply_gated(
        ONE, m, StoredMatrix(ONE, bias=BIAS)), "or biases"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_multiplied_is_refused(what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        call(StoredMatrix(ONE))


def test_a_stack_has_the_type_of_its_parts() -> None:
    assert StoredMatrix(STACK).dtype == mx.float32
    scales = mx.zeros((8, 2), mx.uint8)
    mx.eval(scales)
    assert StoredMatrix(CODES, scales, bits=4, group_size=32, mode="mxfp4").dtype is None
