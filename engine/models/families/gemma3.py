"""Gemma 3, of which text is served. Layers with a window have a RoPE of their own."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

from engine.models.config import ModelConfig
from engine.models.families.gemma2 import gemma_decoder
from engine.models.families.windows import FULL, SLIDING
from engine.models.rope import read_rope
from engine.models.spec import ModelSpec, Rope

UNREAD = tuple(
    (f"{prefix}{part}.", "images")
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
# What the files may leave out of config.json (transformers' Gemma3TextConfig).
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def gemma3(config: ModelConfig) -> ModelSpec:
    text = _changed(config.text, DEFAULTS | config.text.values)
    local, wide = _rope(text, SLIDING), _rope(text, FULL)
    spec = gemma_decoder(
        text,
        "Gemma 3",
        text.count("sliding_window_pattern"),
        lambda window: wide if window is None else local,
        qk_norm=True,
        embedding_scale=_bfloat16(text.count("hidden_size") ** 0.5),  # as it was trained
    )
    return replace(spec, unread=UNREAD)


def _rope(text: ModelConfig, kind: str) -> Rope:
    """Read the RoPE of one kind of layers, of which transformers 5 writes one object each."""
    values, nested = text.values, text.values.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(own := nested.get(kind), dict):
        changes = {"rope_theta": own.get("rope_theta"), "rope_scaling": own}
    elif kind == SLIDING:
        changes = {
            "rope_theta": values["rope_local_base_freq"],
            "rope_scaling": {"type": "default"},
        }
    else:
        changes = {}
    return read_rope(_changed(text, values | changes), text.count("head_dim"))


def _bfloat16(number: float) -> float:
    """Round to the 8 bits that bfloat16 has."""
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(fraction * 2**8), exponent - 8)


def _changed(config: ModelConfig, values: dict[str, Any]) -> ModelConfig:
    changed = copy(config)
    changed.values = values
    return changed
