"""Dimensions of published models, as their config.json has them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.experts import QWEN3_MOE
from tests.hybrids import FIELDS, QWEN3_5_MOE
from tests.models import ModelSpec, write_config


@dataclass(frozen=True, slots=True)
class Published:
    """A model."""

    spec: ModelSpec
    fields: dict[str, Any] = field(default_factory=dict)
    """Of config.json, where it is no dense Qwen3."""

    def write(self, folder: Path, **changes: Any) -> Path:
        """Its folder without weights. changes: further fields."""
        return write_config(folder, self.spec, **(self.fields | changes))


DELTA = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN3_5_4B = ModelSpec(
    num_hidden_layers=32,
    hidden_size=2560,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    intermediate_size=9216,
    vocab_size=248320,
    max_position_embeddings=262144,
)
PUBLISHED = {
    "Qwen3-30B-A3B": Published(
        ModelSpec(
            num_hidden_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        QWEN3_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen3.5-0.8B": Published(
        replace(
            QWEN3_5_4B,
            num_hidden_layers=24,
            hidden_size=1024,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=3584,
        ),
        FIELDS | DELTA | {"linear_num_value_heads": 16},
    ),
    "Qwen3.5-4B": Published(QWEN3_5_4B, FIELDS | DELTA),
    "Qwen3.6-27B": Published(
        replace(
            QWEN3_5_4B,
            num_hidden_layers=64,
            hidden_size=5120,
            num_attention_heads=24,
            intermediate_size=17408,
            tie_word_embeddings=False,
        ),
        FIELDS | DELTA | {"linear_num_value_heads": 48},
    ),
    "Qwen3.6-35B-A3B": Published(
        replace(
            QWEN3_5_4B,
            num_hidden_layers=40,
            hidden_size=2048,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        ),
        QWEN3_5_MOE
        | DELTA
        | {
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
