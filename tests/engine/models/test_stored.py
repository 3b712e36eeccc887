"""Weights are taken by name, as they are stored or wider."""

import mlx.core as mx
import pytest

from engine.models.config import Quantization
from engine.models.stored import StoredWeights
from engine.models.tensors import Matrix, Vector

MATRIX = Matrix("layer", 16, 64, has_bias=True)
PACKING = Quantization(4, 32)


def stored(*, grouped: bool, **how: bool) -> StoredWeights:
    weight = mx.random.normal((16, 64)).astype(mx.bfloat16)
    arrays = {"layer.bias": mx.ones((16,), mx.bfloat16), "norm.weight": mx.ones((8,), mx.bfloat16)}
    names = ("layer.weight", "layer.scales", "layer.biases")
    parts = mx.quantize(weight, PACKING.group_size, PACKING.bits) if grouped else (weight,)
    arrays |= dict(zip(names, parts, strict=False))
    return StoredWeights(arrays, lambda _: PACKING, **how)


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("dequantizes", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_floats_have_the_dtype_that_is_wanted_and_codes_are_words(
    grouped: bool, dequantizes: bool, widens: bool
) -> None:
    weights = stored(grouped=grouped, dequantizes=dequantizes, widens=widens)
    found, dtype = weights.matrix(MATRIX), mx.float32 if widens else mx.bfloat16
    packed = grouped and not dequantizes
    assert found.packing == (PACKING if packed else None)
    assert [a.dtype for a in found.arrays()] == ([mx.uint32] if packed else []) + [dtype] * (
        3 if packed else 2
    )
    assert found.weight.shape == ((16, 8) if packed else (16, 64))
    assert weights.vector(Vector("norm", 8)).dtype == dtype


def test_what_is_taken_is_gone() -> None:
    weights = stored(grouped=True)
    weights.matrix(MATRIX)
    with pytest.raises(KeyError, match=r"layer\.weight"):
        weights.matrix(MATRIX)
