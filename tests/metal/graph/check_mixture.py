"""Mixtures of a few rows in MLX's graph, against the path of long prompts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.models import mlx_ops
from engine.models.config import Quantization
from engine.models.spec import Experts, Gate
from engine.models.stored import StoredMatrix
from tests.metal.graph import _standin
from tests.metal.graph.stage import TOLERANCE, take_mistakes

PACKINGS = {
    "plain": None,
    "affine4": Quantization(bits=4, group_size=64),
    "affine8": Quantization(bits=8, group_size=32),
    "mxfp4": Quantization(bits=4, group_size=32, mode="mxfp4"),
}
SPEC = Experts(experts=12, chosen=3, inner_size=64, normalised=True)
HIDDEN = 192


def stored(
    outputs: int, inputs: int, packing: str, dtype: mx.Dtype, experts: int = SPEC.experts
) -> StoredMatrix:
    shape = (experts, outputs, inputs) if experts > 1 else (outputs, inputs)
    numbers, how = (mx.random.normal(shape) * inputs**-0.5).astype(dtype), PACKINGS[packing]
    if how is None:
        made = StoredMatrix(numbers)
    else:
        parts = mx.quantize(numbers, how.group_size, how.bits, how.mode)
        made = StoredMatrix(*parts[:2], *(parts[2:] or (None,)), packing=how)
    mx.eval(made.arrays())
    return made


def bound(matrix: StoredMatrix) -> metal_ext.StoredMatrix:
    own = matrix.on_metal()
    assert own is not None
    return own


@dataclass(frozen=True, eq=False)
class Layer:
    gate_up: list[StoredMatrix]
    down: StoredMatrix
    shared: list[StoredMatrix]
    kind: Gate

    def bound(self, spec: Experts = SPEC) -> metal_ext.Mixture:
        return metal_ext.Mixture(
            [*map(bound, self.gate_up)], bound(self.down), [*map(bound, self.shared)],
            chosen=spec.chosen, normalised=spec.normalised, kind=self.kind.value,
        )  # fmt: skip


def layer(
    packing: str, dtype: mx.Dtype, *, shared: bool = False, fused: bool = False,
    biased: bool = False, kind: Gate = Gate.SILU,
) -> Layer:  # fmt: skip
    inner, make = SPEC.inner_size, partial(stored, packing=packing, dtype=dtype)
    gate_up = [make(2 * inner, HIDDEN)] if fused else [make(inner, HIDDEN), make(inner, HIDDEN)]
    sizes = [(inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner)] if shared else []
    made = Layer(gate_up, make(HIDDEN, inner), [make(*size, experts=1) for size in sizes], kind)
    if not biased:
        return made

    def with_bias(matrix: StoredMatrix) -> StoredMatrix:
        bias = mx.random.normal(matrix.weight.shape[:2]).astype(dtype)
        mx.eval(bias)
        return replace(matrix, bias=bias)

    return replace(made, gate_up=[*map(with_bias, gate_up)], down=with_bias(made.down))


def rows_of(count: int, dtype: mx.Dtype, experts: int = SPEC.experts) -> list[mx.array]:
    """x, residual, logits, shared gate."""
    widths = (HIDDEN, HIDDEN, experts, 1)
    return [mx.random.normal((count, width)).astype(dtype) for width in widths]


def computed(made: Layer, rows: list[mx.array], mixture: metal_ext.Mixture) -> mx.array:
    x, residual, logits, opening = rows
    return metal_ext.mixture(x, residual, logits, mixture, opening if made.shared else None)


def wide(matrix: StoredMatrix) -> StoredMatrix:
    """With all floats in float32, for which alone MLX has products of plain stacks on a CPU."""

    def widened(array: mx.array) -> mx.array:
        return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

    changed = matrix._changed(widened)
    return changed if matrix.bias is None else replace(changed, bias=widened(matrix.bias))


def expected(made: Layer, rows: list[mx.array]) -> mx.array:
    experts, weights = mlx_ops.route(rows[2], SPEC)
    x, residual, _, opening = (each.astype(mx.float32) for each in rows)
    gate, weights = mlx_ops.GATED[made.kind], weights.astype(mx.float32)
    mixed = mlx_ops.mix(x, experts, weights, [*map(wide, made.gate_up)], wide(made.down), gate)
    if made.shared:
        gates, ups = (mlx_ops._multiply(x, wide(each)) for each in made.shared[:2])
        mixed += mx.sigmoid(opening) * mlx_ops._multiply(gate(gates, ups), wide(made.shared[2]))
    return residual + mixed


def check(found: mx.array, right: mx.array) -> None:
    off = mx.abs(found.astype(mx.float32) - right.astype(mx.float32)).max() / mx.abs(right).max()
    assert float(off) <= TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "how",
    [{"shared": True}, {"fused": True}, {"biased": True, "fused": True, "kind": Gate.CLAMPED_SILU}],
    ids=str,
)
def test_four_commands_in_order_compute_what_mlx_does(
    how: dict[str, Any], packing: str, dtype: mx.Dtype
) -> None:
    made = layer(packing, dtype, **how)
    mixture = made.bound()
    for rows in (1, 2, 7, 40):
        given = rows_of(rows, dtype)
        mx.eval(given)
        _standin.hand_over()
        before = _standin.counts()
        found = computed(made, given, mixture)
        mx.eval(found)
        after = _standin.counts()
        assert after["commands"] - before["commands"] == 4
        assert after["barriers"] - before["barriers"] >= 3
        assert (found.dtype, found.shape) == (dtype, (rows, HIDDEN))
        check(found, expected(made, given))
    assert take_mistakes() == []


def test_a_row_has_the_same_bits_in_any_company() -> None:
    made = layer("affine4", mx.bfloat16, shared=True)
    mixture, given = made.bound(), rows_of(40, mx.bfloat16)
    together = computed(made, given, mixture)
    for first, count in ((0, 1), (39, 1), (3, 2), (5, 8), (7, 33)):
        part = [each[first : first + count] for each in given]
        assert mx.array_equal(computed(made, part, mixture), together[first : first + count])


def test_logits_may_have_another_type_and_arrays_any_order() -> None:
    made = layer("affine4", mx.bfloat16, shared=True)
    mixture, given = made.bound(), rows_of(6, mx.bfloat16)
    right = computed(made, given, mixture)
    given = [mx.concatenate([each, each], axis=1)[:, : each.shape[1]] for each in given]
    given[2] = given[2].astype(mx.float32)
    check(computed(made, given, mixture), right)  # but for weights, which are not rounded now
    assert _standin.calls("mixture").count("ordered_copy") == 3


def test_a_down_projection_may_have_another_format() -> None:
    made = replace(layer("affine4", mx.float32), down=stored(HIDDEN, 64, "affine8", mx.float32))
    given = rows_of(3, mx.float32)
    check(computed(made, given, made.bound()), expected(made, given))


LAYER = layer("affine4", mx.float32, shared=True)
OTHER, MANY = stored(64, HIDDEN, "affine8", mx.float32), stored(32, 32, "plain", mx.float32, 513)
WRONG: dict[str, tuple[Callable[[], Layer], str]] = {
    "stacks": (lambda: replace(LAYER, gate_up=2 * LAYER.gate_up), "4 stacks"),
    "gate and up": (lambda: replace(LAYER, gate_up=[LAYER.gate_up[0], OTHER]), "different formats"),
    "sizes": (lambda: replace(LAYER, down=LAYER.gate_up[0]), "sizes that do not fit"),
    "types": (lambda: replace(LAYER, down=layer("affine4", mx.float16).down), "different types"),
    "biases": (lambda: replace(layer("affine4", mx.float32, biased=True), shared=LAYER.shared),
               "the shared expert"),
    "shared": (lambda: replace(LAYER, shared=layer("plain", mx.float32, shared=True).shared),
               "the shared expert"),
    "two shared": (lambda: replace(LAYER, shared=LAYER.shared[:2]), "three matrices"),
    "experts": (lambda: replace(LAYER, gate_up=[MANY, MANY], down=MANY, shared=[]), "513 experts"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_the_kernels_do_not_have_is_refused(what: str) -> None:
    make, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        make().bound()


WRONG_ROWS: dict[str, tuple[Callable[[mx.array], mx.array], int, str]] = {
    "x": (lambda x: x[:, :64], 0, "hidden"),
    "no rows": (lambda x: x[:0], 0, "hidden"),
    "a residual": (lambda x: x[:1], 1, "hidden"),
    "a residual's type": (lambda x: x.astype(mx.float16), 1, "different types"),
    "logits": (lambda x: x[:, :5], 2, "experts"),
    "logits' type": (lambda x: x.astype(mx.int32), 2, "logits must be float"),
    "a gate": (lambda x: mx.concatenate([x, x]), 3, "shared_gate"),
    "a gate's type": (lambda x: x.astype(mx.float16), 3, "different types"),
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_rows_that_do_not_fit_are_refused(what: str) -> None:
    change, place, words = WRONG_ROWS[what]
    rows = rows_of(2, mx.float32)
    rows[place] = change(rows[place])
    with pytest.raises(ValueError, match=words):
        computed(LAYER, rows, LAYER.bound())


def test_rows_of_another_type_and_a_gate_that_is_missing_are_refused() -> None:
    with pytest.raises(ValueError, match="x and the experts have different types"):
        computed(LAYER, rows_of(2, mx.float16), LAYER.bound())
    with pytest.raises(ValueError, match="shared_gate"):
        computed(replace(LAYER, shared=[]), rows_of(2, mx.float32), LAYER.bound())


def test_numbers_out_of_range_are_refused() -> None:
    for chosen in (0, 13):
        with pytest.raises(IndexError, match="chosen"):
            LAYER.bound(replace(SPEC, chosen=chosen))
    with pytest.raises(IndexError, match="pairs"):
        computed(LAYER, rows_of(342, mx.float32), LAYER.bound())
