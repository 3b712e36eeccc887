"""Matrices in the formats that products read, of random codes, and the numbers that they mean."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.metal.kernels.formats import FORMATS, Floats, Stored

PACKINGS = ("plain", "affine4", "affine8", "mxfp4")
SMALL = ("float plain", "half mxfp4", "bfloat affine4", "bfloat affine8")
GROUP_SHIFT = 5
GROUP = 1 << GROUP_SHIFT
FLOATS4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Packed:
    """A stack of matrices ``[experts][outputs][inputs]``, as kernels read it."""

    packing: str
    codes: Stored
    scales: Stored
    biases: Stored
    numbers: Floats

    @property
    def parts(self) -> list[Stored]:
        return [self.codes, self.scales, self.biases]


def pack(
    random: np.random.Generator, name: str, packing: str, *shape: int, group: int = GROUP
) -> Packed:
    """Numbers of about 1 / sqrt(inputs)."""
    number, inputs = FORMATS[name], shape[-1]
    one = inputs**-0.5
    if packing == "plain":
        codes = number.encode(random.normal(size=shape) * one)
        return Packed(packing, codes, codes, codes, number.decode(codes))
    bits = 8 if packing == "affine8" else 4
    values = random.integers(0, 1 << bits, shape, dtype=np.uint8)
    codes = values if bits == 8 else values[..., ::2] | values[..., 1::2] << 4
    groups = (*shape[:-1], inputs // group)
    if packing == "mxfp4":
        scales: NDArray[np.uint8] = random.integers(-2, 1, groups) + 127 + round(np.log2(one))
        scales = scales.astype(np.uint8)
        wide = np.where(values & 8, -1.0, 1.0) * FLOATS4[values & 7]
        numbers = wide * np.exp2(scales.astype(np.float64) - 127).repeat(group, axis=-1)
        return Packed(packing, codes, scales, codes, numbers)
    steps = (1 << bits) / 3.5
    scales = number.encode(random.uniform(0.5, 1.5, groups) * one / steps)
    biases = number.encode(random.uniform(-1.9, -1.6, groups) * one)
    scale, bias = (number.decode(each).repeat(group, axis=-1) for each in (scales, biases))
    return Packed(packing, codes, scales, biases, scale * values + bias)
