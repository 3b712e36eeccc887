"""Products with weights in four bits, as a model's layers make them, against float64: which kernel
MLX takes depends on the number of rows, and some systems compile one of them wrong."""

from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcache.canary.trial import Action, Finding, require

# One row, a few, and so many that the units for matrices multiply.
ROWS = (1, 8, 64)
INPUTS, OUTPUTS = 1024, 512
BITS, GROUP = 4, 64
# Of the greatest result. On a GPU inputs and results are rounded to eight bits, and sums are not;
# MLX's products on a CPU sum in as many bits as the inputs have, and are asked for float32.
TOLERANCE = 0.02

Numbers = NDArray[np.float64]


def product_actions() -> list[tuple[str, Action]]:
    """All that is tried, in order."""
    return [(f"multiply {rows}", partial(_multiply, rows)) for rows in ROWS]


def _multiply(rows: int) -> Finding:
    random = np.random.default_rng(rows)
    dtype = mx.bfloat16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32
    inputs, weights = (
        mx.array(random.normal(size=(count, INPUTS)).astype(np.float32)).astype(dtype)
        for count in (rows, OUTPUTS)
    )
    codes, scales, biases = mx.quantize(weights, group_size=GROUP, bits=BITS)
    got = mx.quantized_matmul(
        inputs, codes, scales, biases, transpose=True, group_size=GROUP, bits=BITS
    )
    want = _numbers(inputs) @ _unpacked(codes, scales, biases).T
    worst = float(np.abs(_numbers(got) - want).max() / np.abs(want).max())
    said = f"differs by {worst:.1e} of the greatest result; {TOLERANCE} is allowed"
    require(worst <= TOLERANCE, said)
    return Finding(said, {"greatest_difference": worst, "allowed": TOLERANCE})


def _unpacked(codes: mx.array, scales: mx.array, biases: mx.array) -> Numbers:
    """The weights, by their definition: code * scale + bias, the lowest bits first."""
    words = np.array(codes)[..., None] >> np.arange(0, 32, BITS, dtype=np.uint32)
    plain = (words & ((1 << BITS) - 1)).reshape(OUTPUTS, INPUTS // GROUP, GROUP)
    scale, bias = (_numbers(array)[..., None] for array in (scales, biases))
    weights: Numbers = (plain * scale + bias).reshape(OUTPUTS, INPUTS)
    return weights


def _numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32)).astype(np.float64)
