"""Loads a checked folder's weights, on the thread that will run the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import mlx.core as mx

import metal_ext
from engine.models.checkpoint import Checkpoint
from engine.models.config import ModelConfig
from engine.models.cpu_ops import CpuOps
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.safetensors_headers import CheckpointError, weight_files
from engine.models.stored import StoredWeights

FLOAT32_BYTES = 4
Progress = Callable[[int, int], None]
"""Bytes that are loaded, and bytes in all."""


class Arithmetic(Enum):
    """The format in which weights are multiplied."""

    STORED = "stored"
    """As the checkpoint has them."""
    FLOAT32 = "float32"
    """All unpacked to float32."""
    QUANTIZED_FLOAT32 = "quantized-float32"
    """Packed as they are, with scales and sums in float32."""
    PACKED = "packed"
    """As the checkpoint has them, in the order in which the CPU's own kernels read them; sums in
    float32."""


@dataclass(frozen=True, slots=True)
class ArithmeticChoice:
    """How to multiply, and why: the sentence goes to the log."""

    arithmetic: Arithmetic
    weights_bytes: int
    reason: str
    itemsize: int
    """Bytes of a number between two layers."""


def choose_arithmetic(
    checkpoint: Checkpoint, *, on_gpu: bool, memory_bytes: int, setting: Arithmetic | None
) -> ArithmeticChoice:
    """Choose: on a GPU, as stored; on a CPU, packed for its own kernels; what these do not know, as
    float32, which a BLAS can multiply: MLX's loops for 16 and fewer bits are an order of magnitude
    slower.

    memory_bytes: what weights may take. setting: the user's own choice, which wins. Raises
    CheckpointError where packed weights are set and cannot be had.
    """
    packed = None if on_gpu else checkpoint.packed_bytes
    if setting is Arithmetic.PACKED and packed is None:
        raise CheckpointError(
            f"{checkpoint.path}: engine.arithmetic is packed, which a CPU can do with groups of "
            "32, 64 or 128 weights and layers that are all stored alike"
        )
    sizes = {
        Arithmetic.PACKED: packed or 0,
        Arithmetic.STORED: checkpoint.stored_bytes,
        Arithmetic.FLOAT32: checkpoint.num_weights * FLOAT32_BYTES,
        Arithmetic.QUANTIZED_FLOAT32: checkpoint.widened_bytes,
    }
    if setting is not None:
        chosen, reason = setting, "as configured"
    elif on_gpu:
        chosen, reason = Arithmetic.STORED, "the GPU multiplies what is stored"
    elif packed is not None:
        chosen, reason = Arithmetic.PACKED, "the CPU's own kernels multiply what is stored"
    elif sizes[Arithmetic.FLOAT32] <= memory_bytes or not checkpoint.quantized:
        chosen, reason = Arithmetic.FLOAT32, "the CPU's own kernels do not know how this is stored"
    else:
        chosen = Arithmetic.QUANTIZED_FLOAT32
        reason = "unpacked to float32 the weights would not fit into memory"
    itemsize = compute_itemsize(checkpoint.dtype, chosen, on_gpu=on_gpu)
    return ArithmeticChoice(chosen, sizes[chosen], reason, itemsize)


def compute_itemsize(dtype: str, arithmetic: Arithmetic, *, on_gpu: bool) -> int:
    """Return the bytes of a number between two layers: those of what is stored on a GPU, which
    multiplies that; float32's on a CPU, whose kernels sum in it.

    dtype: of the checkpoint's numbers, as safetensors calls it.
    """
    narrow = on_gpu and arithmetic is Arithmetic.STORED and dtype != "F32"
    return 2 if narrow else FLOAT32_BYTES


def load_model(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    progress: Progress,
    workers: metal_ext.CpuWorkers | None,
) -> Forward:
    """Load and evaluate all weights on the calling thread. workers: a CPU's, who also pack."""
    spec, tensors = checkpoint.spec, checkpoint.tensors
    stored = read_weights(checkpoint, arithmetic)
    if arithmetic is not Arithmetic.PACKED:
        ops = MlxOps(spec, tensors, stored)
        evaluate(ops.weights, progress)
        return Forward(spec, ops)
    assert workers is not None, "packed weights are a CPU's"
    total, done = checkpoint.packed_bytes or 0, 0

    def packed(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    progress(0, total)
    model = Forward(spec, CpuOps(spec, tensors, stored, workers, packed))
    progress(total, total)
    return model


def read_weights(checkpoint: Checkpoint, arithmetic: Arithmetic) -> StoredWeights:
    """Return the weights of a checked folder, in that arithmetic, before they are read."""
    arrays: dict[str, mx.array] = {}
    for file in weight_files(checkpoint.path):
        arrays |= cast(dict[str, mx.array], mx.load(str(file)))
    return StoredWeights(
        arrays,
        ModelConfig(checkpoint.path).quantization,
        dequantizes=arithmetic is Arithmetic.FLOAT32,
        widens=arithmetic in (Arithmetic.FLOAT32, Arithmetic.QUANTIZED_FLOAT32),
    )


def evaluate(arrays: Sequence[mx.array], progress: Progress) -> None:
    """Read arrays from their files, one at a time, so that a converted tensor's source is dropped
    before the next one is read."""
    total, done = sum(array.nbytes for array in arrays), 0
    progress(0, total)
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
