"""Layers of every kind that can be packed, and in float64 what they must multiply to."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_ext import CpuWorkers, PackedLinear
from tests.metal_ext.layers import Floats, exact, normal

# Of the sum of the products' magnitudes: what rounding may cost at most, with float32 all along or
# with x in two bfloat16 parts, which leave out 2^-18 of a number.
TOLERANCE = 1e-5
# Of a norm's, a gate's and a sum's own numbers, in float32.
FLOAT32_TOLERANCE = 2e-6

Codes = tuple[mx.array, mx.array | None, int, int]


@dataclass(frozen=True)
class Kind:
    """How a layer's numbers, or its codes' scales, are stored. bits: 0 where they are no codes."""

    dtype: mx.Dtype
    bits: int = 0
    group: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).rpartition(".")[2]
        return f"{self.bits} bits in groups of {self.group}, {name}" if self.bits else name


MXFP4 = Kind(mx.uint8, 4, 32)
KINDS = [Kind(dtype) for dtype in (mx.float32, mx.bfloat16, mx.float16)] + [
    Kind(dtype, bits, group)
    for bits, group, dtype in (
        (4, 32, mx.bfloat16),
        (4, 64, mx.float32),
        (4, 128, mx.float16),
        (2, 64, mx.bfloat16),
        (3, 32, mx.float32),
        (5, 64, mx.float16),
        (6, 128, mx.bfloat16),
        (8, 32, mx.float32),
        (8, 64, mx.bfloat16),
        (8, 128, mx.bfloat16),
    )
]
KINDS.append(MXFP4)
PLAIN = Kind(mx.float32)


@dataclass(frozen=True)
class Part:
    """A layer as a checkpoint has it, and its numbers."""

    weight: mx.array
    codes: Codes | None
    numbers: Floats
    """``[outputs, inputs]``."""
    magnitudes: Floats
    """Of all that is multiplied: of a code's scale and bias both."""


def part(outputs: int, inputs: int, kind: Kind = PLAIN, seed: int = 0) -> Part:
    """Random weights."""
    if kind == MXFP4:
        return floats_of_4_bits(outputs, inputs, seed)
    drawn = normal((outputs, inputs), kind.dtype, seed)
    if not kind.bits:
        return Part(drawn, None, exact(drawn), np.abs(exact(drawn)))
    words, scales, biases = mx.quantize(drawn, kind.group, kind.bits)
    stream = np.unpackbits(np.array(words).view(np.uint8), axis=1, bitorder="little")
    codes = stream.reshape(outputs, inputs, kind.bits) @ 2 ** np.arange(kind.bits)
    wide = [np.repeat(exact(x), kind.group, axis=1) for x in (scales, biases)]
    scaled = codes * wide[0]
    own = (scales, biases, kind.bits, kind.group)
    return Part(words, own, scaled + wide[1], np.abs(scaled) + np.abs(wide[1]))


def floats_of_4_bits(outputs: int, inputs: int, seed: int) -> Part:
    """Random codes and exponents of MXFP4. Kernels add 6 to a float, and have a bias of -6."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (outputs, inputs))
    exponents = random.integers(118, 126, (outputs, inputs // 32))
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = np.repeat(2.0 ** (exponents - 127), 32, axis=1)
    numbers = np.concatenate([sizes, -sizes])[codes] * scales
    words = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8).view(np.uint32)
    own = (mx.array(exponents, mx.uint8), None, 4, 32)
    return Part(mx.array(words), own, numbers, np.abs(numbers) + 12 * scales)


class Joined:
    """Parts as one packed layer."""

    def __init__(self, parts: list[Part], workers: CpuWorkers) -> None:
        codes = [its.codes for its in parts]
        self.packed = PackedLinear([its.weight for its in parts], workers, codes)
        self.numbers = np.concatenate([its.numbers for its in parts])
        self.magnitudes = np.concatenate([its.magnitudes for its in parts])

    def expected(self, x: Floats) -> Floats:
        """x ``[R, inputs]`` times the layer."""
        result: Floats = x @ self.numbers.T
        return result

    def tolerance(self, x: Floats) -> Floats:
        """How far each number of the product may be from that."""
        result: Floats = TOLERANCE * (np.abs(x) @ self.magnitudes.T) + 1e-30
        return result


def layer(outputs: int, inputs: int, kind: Kind, workers: CpuWorkers, seed: int = 0) -> Joined:
    """A packed layer of one part."""
    return Joined([part(outputs, inputs, kind, seed)], workers)


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    """Rows divided by their root mean square, times the weight."""
    result: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return result


def gated(both: Floats, gate: str = "silu") -> Floats:
    """The first half of each row gates the second half."""
    g, up = np.split(both, 2, axis=1)
    if gate == "gelu_tanh":
        result: Floats = g / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) * up
    elif gate == "clamped_silu":
        g = np.minimum(g, 7)
        result = g / (1 + np.exp(-1.702 * g)) * (np.clip(up, -7, 7) + 1)
    else:
        result = g / (1 + np.exp(-g)) * up
    return result
