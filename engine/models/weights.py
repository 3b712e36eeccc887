"""Loads a checkpoint's weights, on the thread that will run the model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx

import metal_ext
from engine.models.checkpoint import Checkpoint
from engine.models.cpu_ops import CpuOps, RotatedCpuOps
from engine.models.draft_head import named_as_drafts
from engine.models.expert_tensors import arrays_by_mlx
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.safetensors_headers import weight_files
from engine.models.stored import StoredWeights
from engine.models.tensors import DTYPES

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
    spec, tensors = checkpoint.spec, checkpoint.tensors
    stored = read_weights(checkpoint, on_gpu=workers is None)
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


def read_weights(checkpoint: Checkpoint, *, on_gpu: bool = False) -> StoredWeights:
    arrays: dict[str, mx.array] = {}
    for file in weight_files(checkpoint.path):
        arrays |= arrays_by_mlx(_load(file))
    if checkpoint.draft_files:
        arrays |= _draft_arrays(checkpoint, on_gpu)
    return StoredWeights(arrays, checkpoint.packings.get)


def _draft_arrays(checkpoint: Checkpoint, on_gpu: bool) -> dict[str, mx.array]:
    """Return the arrays of a draft head in files of its own. A GPU needs the model's dtype."""
    stored = {name: each for file in checkpoint.draft_files for name, each in _load(file).items()}
    arrays, dtype = named_as_drafts(stored), DTYPES[checkpoint.dtype]
    floats = [name for name, each in arrays.items() if mx.issubdtype(each.dtype, mx.floating)]
    return arrays | {name: arrays[name].astype(dtype) for name in floats if on_gpu}


def _load(file: Path) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(str(file)))


def evaluate(arrays: Sequence[mx.array], progress: Progress) -> None:
    """Evaluate lazy arrays one at a time, which reads each array from its file."""
    total, done = sum(array.nbytes for array in arrays), 0
    progress(0, total)
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
