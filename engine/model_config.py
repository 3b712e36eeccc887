"""Reads ``config.json`` of a model folder, and lists the tensors that follow from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.embedding_checkpoint import HEAD_NAME
from engine.safetensors_headers import CheckpointError, read_json


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
        """Return the fields of Dimensions."""
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
        """Return a number above 0."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be a number above 0")
        return value

    def number(self, field: str, value: object) -> None:
        """Check that the value is a number above 0."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be a number above 0")

    def flag(self, field: str) -> bool:
        """Return true or false."""
        value = self.values.get(field)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.file}: {field} is {value!r}; it must be true or false")
        return value

    @property
    def has_plain_rope(self) -> bool:
        """Return whether angles grow with positions, and with nothing else."""
        nested = self.values.get("rope_parameters")
        scaling = self.values.get("rope_scaling") or nested or {}
        if not isinstance(scaling, dict):
            raise CheckpointError(f"{self.file}: rope_scaling is no object")
        kind = scaling.get("type") or scaling.get("rope_type", "default")
        return kind in ("default", "linear")

    def quantization(self, layer: str) -> Quantization | None:
        """Return how the layer of that name is packed, where the config says that any is."""
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


def expected_shapes(
    config: ModelConfig, start: str = "model.", *, with_head: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return every tensor of a Qwen3 model, by its name on the hub, unpacked. start: of the names
    of all below the head."""
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


def packed_shapes(shape: tuple[int, ...], packing: Quantization) -> dict[str, tuple[int, int]]:
    """Return a matrix as MLX packs it: codes in words of 32 bits, a scale and a bias for each
    group."""
    rows, columns = shape
    groups = (rows, columns // packing.group_size)
    return {"weight": (rows, columns * packing.bits // 32), "scales": groups, "biases": groups}
