"""Sizes of weights that have not been fetched yet, to find out first whether they can be served."""

from dataclasses import replace
from pathlib import Path

from engine.models.checkpoint import Checkpoint, checkpoint_of, tensors_of
from engine.models.config import ModelConfig
from engine.models.embedding_checkpoint import HEAD_NAME, is_embedding_checkpoint
from engine.models.families import read_spec
from engine.models.safetensors_headers import Tensor, read_index
from engine.models.tensors import ModelTensors, grouped_tensors

DTYPES = {"float32": "F32", "float16": "F16"}


def promised_checkpoint(path: Path, stored_bytes: int, *, embeds: bool | None = None) -> Checkpoint:
    """Return a folder as it will be once it has its weights, as ``config.json`` promises it.

    stored_bytes: of the weights' files. embeds: as for ``read_checkpoint``. Raises CheckpointError
    with one sentence that names file and field.
    """
    config = ModelConfig(path)
    spec = read_spec(config)
    if embeds is None:
        names = read_index(path) or {HEAD_NAME}
        embeds = is_embedding_checkpoint(path, names, tied=spec.tied_embeddings)
    model = tensors_of(spec, embeds=embeds)
    tensors = promised_tensors(config, model)
    layers = (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    packings = {layer: packing for layer in layers if (packing := config.quantization(layer))}
    promised = checkpoint_of(config, spec, tensors, packings, embeds=embeds)
    # A head may be there that is never read. Whatever else the files have beyond the promise is
    # taken for weights that are wider than config.json says.
    embedding = f"{model.embedding.name}."
    unread = sum(t.stored_bytes for name, t in tensors.items() if name.startswith(embedding))
    foreseen = promised.stored_bytes + (unread if model.head is None else 0)
    packed_bytes = promised.packed_bytes + max(0, stored_bytes - foreseen)
    return replace(promised, stored_bytes=stored_bytes, packed_bytes=packed_bytes)


def promised_tensors(config: ModelConfig, model: ModelTensors) -> dict[str, Tensor]:
    """Return a model's tensors, in the dtype and the packing that ``config.json`` names. Raises
    CheckpointError."""
    values = config.text.values
    dtype = DTYPES.get(str(values.get("dtype") or values.get("torch_dtype")), "BF16")
    tensors: dict[str, Tensor] = {}
    for name, shape in model.shapes.items():
        layer = name.removesuffix(".weight")
        packing = config.quantization(layer) if len(shape) > 1 else None
        if packing is None or shape[-1] % packing.group_size:
            tensors[name] = Tensor("", dtype, shape)
            continue
        for part, (part_dtype, part_shape) in grouped_tensors(shape, packing, dtype).items():
            tensors[f"{layer}.{part}"] = Tensor("", part_dtype, part_shape)
    return tensors
