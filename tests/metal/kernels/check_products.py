"""products, gated_product: against float64 and MLX. A row has the same bits in any company."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.kernels.device import Device, struct
from tests.metal.kernels.formats import FORMATS, Floats, Format, Stored
from tests.metal.kernels.memory import exact_copy
from tests.metal.kernels.packed import pack
from tests.metal.kernels.reference import gated

THREADS, OUTPUTS, GATE_OUTPUTS, MATRICES = 64, 8, 4, 4
ROUNDING = {"float": 0.0, "half": 2.0**-11, "bfloat": 2.0**-8}
SUMMED = 3e-6  # of the sum of a product's absolute terms, in float32


@dataclass(frozen=True)
class Packing:
    """A format of weights. Groups of 1 are plain numbers."""

    name: str
    group: int
    inputs: int

    @property
    def bits(self) -> int:
        return {"affine4": 4, "affine8": 8, "mxfp4": 4}.get(self.name, 0)


PACKINGS = [
    *(Packing("plain", 1, 592), Packing("mxfp4", 32, 768), Packing("affine4", 32, 96)),
    *(Packing("affine4", 64, 896), Packing("affine4", 128, 1024), Packing("affine8", 32, 544)),
    *(Packing("affine8", 64, 768), Packing("affine8", 128, 896)),
]
SMALL = {"float": PACKINGS[:1], "half": PACKINGS[1:2], "bfloat": [PACKINGS[3], PACKINGS[5]]}
CASES = [
    pytest.param(name, its, marks=[pytest.mark.small] if its in SMALL[name] else [])
    for name in FORMATS
    for its in PACKINGS
]
IN_ALL_FORMATS = pytest.mark.parametrize(
    ("name", "packing"), CASES, ids=lambda its: its if isinstance(its, str) else str(its.group)
)


@dataclass(frozen=True)
class Weights:
    """A random matrix: what kernels read, and its numbers."""

    parts: list[Stored]
    added: Stored
    numbers: Floats

    @property
    def outputs(self) -> int:
        return len(self.numbers)


def weights(number: Format, packing: Packing, outputs: int, seed: int) -> Weights:
    random = np.random.default_rng(seed)
    shape = outputs, packing.inputs
    packed = pack(random, number.name, packing.name, *shape, group=packing.group)
    return Weights(packed.parts, number.encode(random.normal(size=outputs)), packed.numbers)


def random_rows(name: str, rows: int, inputs: int) -> Stored:
    return FORMATS[name].encode(np.random.default_rng(rows).normal(size=(rows, inputs)))


def multiply(
    device: Device, name: str, packing: Packing, x: Stored, matrices: Sequence[Weights],
    tile: int, *, added: int = 0, residual: Stored | None = None, gate: int | None = None,
) -> list[Stored]:  # fmt: skip
    """Run products, or gated_product with a ``gate``, for tiles of rows. Behind what they read lies
    no memory, before it NaN. ``added`` has a bit for each matrix with a bias."""
    rows, results = len(x), matrices if gate is None else matrices[:1]
    out = [FORMATS[name].nans(rows * its.outputs + 9) for its in results]
    per_tile = OUTPUTS if gate is None else GATE_OUTPUTS
    tiles = [-(-its.outputs // per_tile) for its in results]
    firsts = np.cumsum([0, *tiles])[:-1]
    arguments = struct(
        "ProductArguments", packing.inputs, rows, len(results), packing.group.bit_length() - 1,
        added, residual is not None, gate or 0, 0, *(np.resize(its, MATRICES) for its in
        ([w.outputs for w in results], firsts)),
    )  # fmt: skip
    every = [matrices[i if i < len(matrices) else 0] for i in range(MATRICES)]
    outs = [out[i if i < len(out) else 0] for i in range(MATRICES)]
    read = [exact_copy(part) for w in every for part in (*w.parts, w.added)]
    numbers, to_add = exact_copy(x), exact_copy(x if residual is None else residual)
    parts = [[address for address, _ in read[i::4]] for i in range(4)]
    kernel = f"{'products' if gate is None else 'gated_product'}_{name}_{packing.name}_{tile}"
    buffers: list[Stored | int] = [numbers[0], *chain(*parts), *outs, to_add[0], arguments]
    if gate is not None:
        buffers = [numbers[0], *(parts[i][m] for m in (0, 1) for i in range(3)), out[0], arguments]
    device.threadgroups(kernel, buffers, (-(-rows // tile), sum(tiles)), (THREADS,))
    assert all(np.isnan(FORMATS[name].decode(each[-9:])).all() for each in out), "written behind it"
    return [each[:-9].reshape(rows, -1) for each in out]


def check(name: str, found: Stored, product: Floats, bias: Floats, size: Floats) -> None:
    """``size`` is the sum of a product's absolute terms."""
    off = np.abs(FORMATS[name].decode(found) - (product + bias))
    rounded = ROUNDING[name] * (np.abs(product) + np.abs(product + bias))
    assert (off <= rounded + SUMMED * (size + np.abs(bias))).all()


def by_mlx(name: str, packing: Packing, x: Floats, its: Weights) -> Floats:
    """In float32."""
    wide, codes = mx.array(x.astype(np.float32)), its.parts[0].view(np.uint32)
    if not packing.bits:
        return np.array(wide @ mx.array(its.numbers.astype(np.float32)).T).astype(np.float64)
    affine = packing.name != "mxfp4"
    scales, biases = (
        mx.array(FORMATS[name].decode(part).astype(np.float32)) if affine else mx.array(part)
        for part in its.parts[1:]
    )
    how = (True, packing.group, packing.bits, "affine" if affine else "mxfp4")
    product = mx.quantized_matmul(wide, mx.array(codes), scales, biases if affine else None, *how)
    return np.array(product).astype(np.float64)


@IN_ALL_FORMATS
def test_up_to_four_matrices_are_multiplied_and_biases_added(
    device: Device, name: str, packing: Packing
) -> None:
    number = FORMATS[name]
    made = [weights(number, packing, n, seed) for seed, n in enumerate((5, 24, 1, 10))]
    for count, rows, tile in ((1, 1, 1), (2, 2, 2), (3, 3, 4), (4, 5, 4), (4, 3, 2)):
        x, matrices, added = random_rows(name, rows, packing.inputs), made[:count], 0b1101
        wide = number.decode(x)
        found = multiply(device, name, packing, x, matrices, tile, added=added)
        for i, (its, product) in enumerate(zip(matrices, found, strict=True)):
            for right in (wide @ its.numbers.T, by_mlx(name, packing, wide, its)):
                bias = number.decode(its.added) * (added >> i & 1)
                check(name, product, right, bias, np.abs(wide) @ np.abs(its.numbers).T)


@pytest.mark.small
@pytest.mark.parametrize("added", [0, 1])
def test_the_residual_is_added_to_the_rounded_product(device: Device, added: int) -> None:
    packing, number = PACKINGS[3], FORMATS["bfloat"]
    its, x = weights(number, packing, 21, 3), random_rows("bfloat", 3, packing.inputs)
    residual = random_rows("bfloat", 3, 21)
    product = multiply(device, "bfloat", packing, x, [its], 4, added=added)[0]
    found = multiply(device, "bfloat", packing, x, [its], 4, added=added, residual=residual)[0]
    assert np.array_equal(found, number.encode(number.decode(product) + number.decode(residual)))


@IN_ALL_FORMATS
def test_a_gated_product_is_what_the_gate_makes_of_rounded_products(
    device: Device, name: str, packing: Packing
) -> None:
    number = FORMATS[name]
    matrices = [weights(number, packing, 6, seed) for seed in (1, 2)]
    for kind, rows, tile in ((0, 1, 1), (1, 2, 2), (2, 5, 4)):
        wide = number.decode(random_rows(name, rows, packing.inputs))
        most = 4 if kind == 1 else 100  # float32's exp() is infinite for more than 88
        x = number.encode(most * wide / np.abs(wide @ matrices[0].numbers.T).max())
        g, u = (number.decode(p) for p in multiply(device, name, packing, x, matrices, tile))
        found = number.decode(multiply(device, name, packing, x, matrices, tile, gate=kind)[0])
        wanted = gated(g, u, kind)
        assert (np.abs(found - wanted) <= (ROUNDING[name] + 2e-5) * np.abs(wanted) + 1e-6).all()


@IN_ALL_FORMATS
def test_a_row_has_the_same_bits_in_any_company_and_order(
    ordered: Device, name: str, packing: Packing
) -> None:
    matrices = [weights(FORMATS[name], packing, n, n) for n in (9, 3)]
    x = random_rows(name, 8, packing.inputs)
    alone = multiply(ordered, name, packing, x, matrices, 1, added=2)
    gates = [matrices[0]] * 2
    gated_alone = multiply(ordered, name, packing, x, gates, 1, gate=0)
    for seed, (first, count, tile) in enumerate(
        ((0, 8, 4), (0, 8, 2), (3, 1, 1), (1, 2, 2), (2, 3, 4), (5, 3, 4), (1, 7, 4), (0, 5, 4))
    ):
        ordered.set_order(seed)
        rows = x[first : first + count]
        found = multiply(ordered, name, packing, rows, matrices, tile, added=2)
        found += multiply(ordered, name, packing, rows, gates, tile, gate=0)
        for some, every in zip(found, (*alone, *gated_alone), strict=True):
            assert np.array_equal(some, every[first : first + count])
