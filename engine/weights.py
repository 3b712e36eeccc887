"""Loads a checked folder's weights, on the thread that will run the model."""

import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten

import metal_ext
from engine.checkpoint import Checkpoint, CheckpointError
from engine.models.packed_qwen3 import PackedQwen3
from engine.models.qwen3 import Qwen3
from engine.packed_weights import pack_qwen3

# mlx_lm lowers the limit of open files for the whole process when it is imported.
with mock.patch.object(resource, "setrlimit"):
    from mlx_lm.models.qwen3 import Model, ModelArgs
    from mlx_lm.utils import dequantize_model, load_model

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


def load_qwen3(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    progress: Progress,
    workers: metal_ext.CpuWorkers | None,
) -> Qwen3 | PackedQwen3:
    """Load and evaluate all weights on the calling thread. workers: a CPU's, who also pack."""
    if arithmetic is not Arithmetic.PACKED:
        return Qwen3(load_reference(checkpoint, arithmetic, progress))
    assert workers is not None, "packed weights are a CPU's"
    total, done = checkpoint.packed_bytes or 0, 0

    def packed(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    progress(0, total)
    model = pack_qwen3(lazy_reference(checkpoint), workers, packed)
    progress(total, total)
    return model


def load_reference(checkpoint: Checkpoint, arithmetic: Arithmetic, progress: Progress) -> Any:
    """Return mlx-lm's model of that checkpoint, in that arithmetic: its layers are ours, its
    forward is what ours is compared with."""
    model = lazy_reference(checkpoint)
    if arithmetic is Arithmetic.FLOAT32:
        model = dequantize_model(model)
    if arithmetic is not Arithmetic.STORED:
        model.set_dtype(mx.float32)
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    total = sum(array.nbytes for _, array in parameters)
    done = 0
    progress(0, total)
    # One at a time, so that a converted tensor's source is dropped before the next one is read.
    for _, array in parameters:
        mx.eval(array)
        done += array.nbytes
        progress(done, total)
    return model


def lazy_reference(checkpoint: Checkpoint) -> Any:
    """Return mlx-lm's model of that checkpoint, before its weights are read."""
    # Without a head of its own the model is built as if it were tied.
    config = {"tie_word_embeddings": checkpoint.tied_embeddings or checkpoint.embeds}
    model, _ = load_model(
        checkpoint.path,
        lazy=True,
        strict=True,
        model_config=config,
        get_model_classes=lambda config: (_class_of(checkpoint), ModelArgs),
    )
    return model


def _class_of(checkpoint: Checkpoint) -> type:
    """Return mlx-lm's model class, which takes the checkpoint's weights by their own names."""

    class NamedModel(Model):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Return the weights without the head that nobody uses."""
            kept: dict[str, mx.array] = super().sanitize(weights)
            start = "model." if checkpoint.bare_names else ""
            heads = {name for name in kept if name.startswith("lm_head.")}
            named = {start + name: kept[name] for name in kept.keys() - heads}
            return named if checkpoint.embeds else named | {name: kept[name] for name in heads}

    return NamedModel
