"""Loads a checkpoint's weights, on the thread that will run the model."""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx

import metal_ext
from engine.models.checkpoint import Checkpoint
from engine.models.cpu_ops import CpuOps, RotatedCpuOps
from engine.models.expert_tensors import arrays_by_mlx
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.safetensors_headers import weight_files
from engine.models.stored import StoredWeights

FLOAT32_BYTES = 4
Progress = Callable[[int, int], None]
"""A function that is called with the number of loaded bytes and the number of all bytes."""


def compute_itemsize(dtype: str, *, on_gpu: bool) -> int:
    """Return the bytes of an activation, for a checkpoint of ``dtype``, for example "BF16"."""
    return 2 if on_gpu and dtype != "F32" else FLOAT32_BYTES


def load_model(
    checkpoint: Checkpoint, progress: Progress, workers: metal_ext.CpuWorkers | None
) -> Forward:
    """Load all weights on this thread. ``workers`` (CPU threads) pack them; None on a GPU."""
    spec, tensors, stored = checkpoint.spec, checkpoint.tensors, read_weights(checkpoint)
    if workers is None:
        ops = MlxOps(spec, tensors, stored)
        evaluate(ops.weights, progress)
        ops.stop_counting()
        return Forward(spec, ops)
    total, done = checkpoint.packed_bytes, 0

    def packed(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    progress(0, total)
    cpu_ops: CpuOps | RotatedCpuOps
    if tensors.blocks:
        cpu_ops = RotatedCpuOps(spec, tensors, stored).pack(workers, packed)
    else:
        cpu_ops = CpuOps(spec, tensors, stored, workers, packed)
    progress(total, total)
    return Forward(spec, cpu_ops)


def read_weights(checkpoint: Checkpoint) -> StoredWeights:
    arrays: dict[str, mx.array] = {}
    for file in weight_files(checkpoint.path):
        arrays |= arrays_by_mlx(cast(dict[str, mx.array], mx.load(str(file))))
    return StoredWeights(arrays, checkpoint.packings.get)


def evaluate(arrays: Sequence[mx.array], progress: Progress) -> None:
    """Evaluate lazy arrays one at a time, which reads each array from its file."""
    total, done = sum(array.nbytes for array in arrays), 0
    progress(0, total)
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
