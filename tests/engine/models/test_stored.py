"""Weights are taken by name, as they are stored."""

import mlx.core as mx
import pytest

import metal_ext
from engine.models.config import MODES, Quantization
from engine.models.stored import StoredWeights
from engine.models.tensors import Matrix, Vector
from tests.kvcache.metal_double import install

MATRIX = Matrix("layer", 16, 64, has_bias=True)
PLAIN = mx.random.normal((16, 64)).astype(mx.bfloat16)


def stored(packing: Quantization | None) -> StoredWeights:
    arrays = {"layer.bias": mx.ones((16,), mx.bfloat16), "norm.weight": mx.ones((8,), mx.bfloat16)}
    names = ("layer.weight", "layer.scales", "layer.biases")
    parts: tuple[mx.array, ...] = (PLAIN,)
    if packing is not None:
        parts = mx.quantize(PLAIN, packing.group_size, packing.bits, packing.mode)
    return StoredWeights(arrays | dict(zip(names, parts, strict=False)), lambda _: packing)


def test_plain_numbers_are_as_they_are() -> None:
    weights = stored(None)
    found = weights.matrix(MATRIX)
    assert found.dequantized() is found.weight is PLAIN
    assert [array.dtype for array in found.arrays()] == [mx.bfloat16] * 2
    assert mx.array_equal(found.dequantized(mx.array([3, 1])), PLAIN[mx.array([3, 1])])
    assert weights.vector(Vector("norm", 8)).shape == (8,)


@pytest.mark.parametrize("mode", MODES)
def test_codes_are_words_and_can_be_plain_numbers(mode: str) -> None:
    bits, group_sizes = MODES[mode]
    packing = Quantization(bits[-1], group_sizes[0], mode)
    found = stored(packing).matrix(MATRIX)
    assert found.packing is packing
    assert found.weight.dtype == mx.uint32
    assert len(found.arrays()) == (4 if mode == "affine" else 3)
    for dtype in (mx.bfloat16, mx.float32):
        rows = found.dequantized(mx.array([3, 1]), dtype)
        assert rows.dtype == (mx.bfloat16 if mode == "affine" else dtype)
        assert mx.array_equal(rows, found.dequantized()[mx.array([3, 1])])
        assert mx.allclose(rows, PLAIN[mx.array([3, 1])], atol=1.0).item()


@pytest.mark.parametrize(
    "packing", [None, Quantization(4, 32), Quantization(3, 32), Quantization(4, 32, "mxfp4")]
)
def test_an_alias_has_the_same_numbers(packing: Quantization | None) -> None:
    """Alone, and in a product by element, for which MLX looks at how many numbers count."""
    found, norm = stored(packing).matrix(MATRIX), mx.arange(64).astype(mx.bfloat16)
    with pytest.raises(ValueError, match="evaluated"):
        metal_ext.uncounted(found.weight + 0, transposable=True)
    mx.eval(found.arrays())
    alias, rows = found.uncounted(), mx.array([3, 1])
    assert mx.array_equal(alias.dequantized() * norm, found.dequantized() * norm)
    assert mx.array_equal(alias.dequantized(rows), found.dequantized(rows))


def test_quires_own_kernels_have_some_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for packing, dtype in (
        (None, mx.bfloat16),
        (Quantization(8, 64), mx.bfloat16),
        (Quantization(4, 32, "mxfp4"), None),
    ):
        own = stored(packing).matrix(MATRIX).on_metal()
        assert own is not None
        assert own.dtype is dtype or own.dtype == dtype
    assert stored(Quantization(6, 64)).matrix(MATRIX).on_metal() is None


def test_what_is_taken_is_gone() -> None:
    weights = stored(Quantization(4, 32))
    weights.matrix(MATRIX)
    with pytest.raises(KeyError, match=r"layer\.weight"):
        weights.matrix(MATRIX)


def test_outputs_that_files_have_in_groups_are_read_part_by_part() -> None:
    numbers = mx.arange(12.0)[:, None] * mx.ones((1, 64))
    matrix = Matrix("layer", 12, 64, parts=(1, 3, 2))
    wanted = [0, 6, 1, 2, 3, 7, 8, 9, 4, 5, 10, 11]
    plain = StoredWeights({"layer.weight": numbers}, lambda _: None).matrix(matrix)
    assert plain.weight[:, 0].tolist() == wanted
    packing = Quantization(8, 64)
    parts = mx.quantize(numbers, 64, 8)
    arrays = dict(zip(("layer.weight", "layer.scales", "layer.biases"), parts, strict=True))
    packed = StoredWeights(arrays, lambda _: packing).matrix(matrix)
    assert packed.dequantized()[:, 0].tolist() == wanted
