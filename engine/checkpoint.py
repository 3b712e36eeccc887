"""What a model folder promises, checked before anything is loaded.

``config.json`` says which tensors there must be, the files' headers say which there are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.embedding_checkpoint import BARE_NAME, HEAD_NAME, is_embedding_checkpoint
from engine.safetensors_headers import (
    ITEM_BYTES,
    CheckpointError,
    Tensor,
    read_json,
    read_tensors,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ModelConfig",
    "Quantization",
    "expected_shapes",
    "read_checkpoint",
]

FLOAT_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a layer's weights are packed: MLX's affine groups."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What ``config.json`` says of a model's size."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool


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
    num_weights: int
    """Numbers of all weight matrices, however they are packed."""
    embeds: bool
    """Whether it makes vectors of texts, and generates nothing."""
    bare_names: bool
    """Whether its tensors are named without ``model.``."""


def read_checkpoint(path: Path, *, embeds: bool | None = None) -> Checkpoint:
    """Checks a folder. embeds: whether it makes vectors; None: as its files say.

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
    num_weights = 0
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{path}: no file holds the tensor {name} that config.json needs")
        _check_tensor(path, name, tensor, shape, tensors, config)
        num_weights += math.prod(shape)
    tolerated = {HEAD_NAME} if tied or embeds else set()
    for name in tensors:
        if name not in expected and name not in packed and name not in tolerated:
            raise CheckpointError(
                f"{path / tensors[name].file}: the tensor {name} has no place in a Qwen3 model"
            )
    norm = tensors[f"{start}norm.weight"]
    return Checkpoint(
        **config.dimensions(),
        path=path,
        eos_token_ids=_eos_token_ids(path, config),
        dtype=norm.dtype,
        quantized=bool(packed),
        stored_bytes=sum(t.size * ITEM_BYTES[t.dtype] for t in tensors.values()),
        widened_bytes=sum(t.size * ITEM_BYTES["F32"] for t in tensors.values()),
        num_weights=num_weights,
        embeds=embeds,
        bare_names=not start,
    )


# --- config.json -------------------------------------------------------------------------------


class ModelConfig:
    """``config.json`` with questions that name the field when the answer is wrong: each raises
    CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.file = path / "config.json"
        self.values = read_json(self.file)
        model_type = self.values.get("model_type")
        if model_type != "qwen3":
            raise CheckpointError(
                f"{self.file}: model_type is {model_type!r}; quire serves qwen3 (dense) models"
            )
        packing = self.values.get("quantization_config")
        method = packing.get("quant_method") if isinstance(packing, dict) else None
        if method is not None and "quantization" not in self.values:
            raise CheckpointError(
                f"{self.file}: quantization_config.quant_method is {method!r}; quire serves "
                "unquantised models and MLX's own 4 and 8 bits"
            )
        if self.values.get("use_sliding_window"):
            raise CheckpointError(
                f"{self.file}: use_sliding_window is true; quire serves full attention only"
            )
        self.number("rms_norm_eps", self.values.get("rms_norm_eps"))
        rope = self.values.get("rope_parameters")
        nested = rope.get("rope_theta") if isinstance(rope, dict) else None
        self.number("rope_theta", self.values.get("rope_theta", nested))
        if self.count("num_attention_heads") % self.count("num_key_value_heads"):
            raise CheckpointError(
                f"{self.file}: num_attention_heads ({self.count('num_attention_heads')}) is not a "
                f"multiple of num_key_value_heads ({self.count('num_key_value_heads')})"
            )

    def dimensions(self) -> dict[str, Any]:
        """The fields of Dimensions."""
        return {
            "num_layers": self.count("num_hidden_layers"),
            "hidden_size": self.count("hidden_size"),
            "intermediate_size": self.count("intermediate_size"),
            "query_heads": self.count("num_attention_heads"),
            "kv_heads": self.count("num_key_value_heads"),
            "head_dim": self.count("head_dim"),
            "vocab_size": self.count("vocab_size"),
            "max_position_embeddings": self.count("max_position_embeddings"),
            "tied_embeddings": self.flag("tie_word_embeddings"),
        }

    def count(self, field: str) -> int:
        """A number above 0."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be a number above 0")
        return value

    def number(self, field: str, value: object) -> None:
        """Checks that the value is a number above 0."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be a number above 0")

    def flag(self, field: str) -> bool:
        """True or false."""
        value = self.values.get(field)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be true or false")
        return value

    def quantization(self, layer: str) -> Quantization | None:
        """How the layer of that name is packed, where the config says that any is."""
        default = self.values.get("quantization")
        if not isinstance(default, dict):
            return None
        own = default.get(layer)
        chosen = own if isinstance(own, dict) else default
        if chosen.get("mode", "affine") != "affine":
            raise CheckpointError(
                f"{self.file}: quantization.mode is {chosen['mode']!r}; quire serves affine groups"
            )
        try:
            found = Quantization(int(chosen["bits"]), int(chosen["group_size"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.file}: quantization needs the numbers bits and group_size"
            ) from error
        if found.bits not in (4, 8) or found.group_size < 1:
            raise CheckpointError(
                f"{self.file}: quantization.bits is {found.bits}; quire serves 4 and 8"
            )
        return found


def _eos_token_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    """Tokens that end a generation: generation_config.json's, else config.json's."""
    generation = path / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{config.file}: eos_token_id is {found!r}; it must be token ids")
    return tuple(ids)


def expected_shapes(
    config: ModelConfig, start: str = "model.", *, with_head: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Qwen3 model, by its name on the hub, unpacked. start: of the names of all
    below the head."""
    hidden, inner = config.count("hidden_size"), config.count("intermediate_size")
    head = config.count("head_dim")
    queries = config.count("num_attention_heads") * head
    keys = config.count("num_key_value_heads") * head
    vocab = config.count("vocab_size")
    yield f"{start}embed_tokens.weight", (vocab, hidden)
    for number in range(config.count("num_hidden_layers")):
        layer = f"{start}layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield f"{start}norm.weight", (hidden,)
    if with_head:
        yield HEAD_NAME, (vocab, hidden)


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
    rows, columns = shape
    wanted = {
        f"{layer}.weight": ("U32", (rows, columns * packing.bits // 32)),
        f"{layer}.scales": (scales.dtype, (rows, columns // packing.group_size)),
        f"{layer}.biases": (scales.dtype, (rows, columns // packing.group_size)),
    }
    for part, (dtype, part_shape) in wanted.items():
        found = tensors.get(part)
        if found is None:
            raise CheckpointError(f"{path}: {part} is missing beside {layer}.scales")
        if found.dtype != dtype or found.shape != part_shape or scales.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{path / found.file}: {part} is {found.dtype} {list(found.shape)}, but "
                f"config.json ({packing.bits} bits in groups of {packing.group_size}) makes it "
                f"{dtype} {list(part_shape)}"
            )
