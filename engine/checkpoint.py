"""Checks a model folder before anything of it is loaded.

``config.json`` says which tensors there must be, the files' headers say which there are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.embedding_checkpoint import BARE_NAME, HEAD_NAME, is_embedding_checkpoint
from engine.model_config import Dimensions, ModelConfig, expected_shapes, packed_shapes
from engine.packed_sizes import packed_bytes
from engine.safetensors_headers import (
    ITEM_BYTES,
    CheckpointError,
    Tensor,
    read_json,
    read_tensors,
)

__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint"]

FLOAT_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Checkpoint(Dimensions):
    """A folder that has been found complete."""

    path: Path
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Of the float tensors: "F32", "BF16" or "F16"."""
    quantized: bool
    stored_bytes: int
    """Of all tensors as they are stored."""
    widened_bytes: int
    """Of all tensors with their float numbers as float32."""
    packed_bytes: int | None
    """Of all tensors as the CPU's kernels read them; None where these do not know them."""
    num_weights: int
    """Numbers of all weight matrices, however they are packed."""
    embeds: bool
    """Whether it makes vectors of texts, and generates nothing."""
    bare_names: bool
    """Whether its tensors are named without ``model.``."""


def read_checkpoint(path: Path, *, embeds: bool | None = None) -> Checkpoint:
    """Check a folder. embeds: whether it makes vectors; None: as its files say.

    Raises CheckpointError with one sentence that names file and field.
    """
    config = ModelConfig(path)
    tensors = read_tensors(path)
    tied = config.flag("tie_word_embeddings")
    if embeds is None:
        embeds = is_embedding_checkpoint(path, tensors, tied=tied)
    start = "" if BARE_NAME in tensors else "model."
    expected = dict(expected_shapes(config, start, with_head=not (tied or embeds)))
    packed = {name for name in tensors if name.endswith((".scales", ".biases"))}
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{path}: no file holds the tensor {name} that config.json needs")
        _check_tensor(path, name, tensor, shape, tensors, config)
    tolerated = {HEAD_NAME} if tied or embeds else set()
    for name in tensors:
        if name not in expected and name not in packed and name not in tolerated:
            raise CheckpointError(
                f"{path / tensors[name].file}: the tensor {name} has no place in a Qwen3 model"
            )
    return checkpoint_of(config, expected, tensors, embeds=embeds, bare_names=not start)


def checkpoint_of(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    *,
    embeds: bool,
    bare_names: bool = False,
) -> Checkpoint:
    """Return what weights amount to. shapes: of what a model consists of, unpacked, by name.
    tensors: what the files hold."""
    path = config.file.parent
    norm = tensors["norm.weight" if bare_names else "model.norm.weight"]
    return Checkpoint(
        **config.dimensions(),
        path=path,
        eos_token_ids=_eos_token_ids(path, config),
        dtype=norm.dtype,
        quantized=any(name.endswith(".scales") for name in tensors),
        stored_bytes=sum(tensor.stored_bytes for tensor in tensors.values()),
        widened_bytes=sum(t.size * ITEM_BYTES["F32"] for t in tensors.values()),
        packed_bytes=(
            packed_bytes(shapes, tensors, config.quantization) if config.has_plain_rope else None
        ),
        num_weights=sum(math.prod(shape) for shape in shapes.values()),
        embeds=embeds,
        bare_names=bare_names,
    )


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a generation: generation_config.json's, else config.json's."""
    generation = path / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{config.file}: eos_token_id is {found!r}; it must be token ids")
    return tuple(ids)


def _check_tensor(
    path: Path,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    tensors: dict[str, Tensor],
    config: ModelConfig,
) -> None:
    layer = name.removesuffix(".weight")
    scales = tensors.get(f"{layer}.scales")
    if scales is None:
        if tensor.dtype not in FLOAT_TYPES or tensor.shape != shape:
            raise CheckpointError(
                f"{path / tensor.file}: {name} is {tensor.dtype} {list(tensor.shape)}, but "
                f"config.json makes it a float of {list(shape)}"
            )
        return
    packing = config.quantization(layer)
    if packing is None:
        raise CheckpointError(
            f"{path / scales.file}: {layer}.scales exists, but config.json has no quantization"
        )
    expected = {
        f"{layer}.{part}": (scales.dtype if part != "weight" else "U32", part_shape)
        for part, part_shape in packed_shapes(shape, packing).items()
    }
    for part, (dtype, part_shape) in expected.items():
        found = tensors.get(part)
        if found is None:
            raise CheckpointError(f"{path}: {part} is missing beside {layer}.scales")
        if found.dtype != dtype or found.shape != part_shape or scales.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{path / found.file}: {part} is {found.dtype} {list(found.shape)}, but "
                f"config.json ({packing.bits} bits in groups of {packing.group_size}) makes it "
                f"{dtype} {list(part_shape)}"
            )
