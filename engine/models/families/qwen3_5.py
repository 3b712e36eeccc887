"""Qwen3.5 and 3.6, dense: three gated delta nets, then attention whose output is gated and of whose
heads a part turns."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.rope import read_rope
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, DenseMlp, GatedDeltaNet, LayerSpec, Mixer, ModelSpec

# What reads images, and what drafts tokens: text is served without.
UNREAD = ("mtp.", "language_model.mtp.", "model.visual.", "vision_tower.")
# Of the layers that attend, where config.json does not say: each so many-th.
ATTENTION_INTERVAL = 4
PARTIAL_ROTARY_FACTOR = 0.25


def qwen3_5(config: ModelConfig) -> ModelSpec:
    """Return the spec of a Qwen3.5. Raises CheckpointError."""
    text = config.text
    mlp = DenseMlp(text.count("intermediate_size"))
    return ModelSpec(
        family="Qwen3.5",
        vocab_size=text.count("vocab_size"),
        hidden_size=text.count("hidden_size"),
        layers=tuple(LayerSpec(mixer, mlp) for mixer in hybrid_mixers(text)),
        tied_embeddings=text.flag("tie_word_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.count("max_position_embeddings"),
        unread=UNREAD,
    )


def hybrid_mixers(text: ModelConfig) -> list[Mixer]:
    """Return the mixers of all layers. text: the config of the part that reads text. Raises
    CheckpointError."""
    attention, delta = _attention(text), _delta(text)
    interval = ATTENTION_INTERVAL
    if "full_attention_interval" in text.values:
        interval = text.count("full_attention_interval")
    layers = range(1, text.count("num_hidden_layers") + 1)
    mixers: list[Mixer] = [delta if number % interval else attention for number in layers]
    kinds = ["linear_attention" if its is delta else "full_attention" for its in mixers]
    if text.values.get("layer_types", kinds) != kinds:
        raise CheckpointError(
            f"{text.file}: layer_types are not those of full_attention_interval {interval}"
        )
    return mixers


def _attention(text: ModelConfig) -> Attention:
    if text.values.get("attention_bias"):
        raise CheckpointError(f"{text.file}: attention_bias is true; quire serves Qwens without")
    heads, kv_heads = text.count("num_attention_heads"), text.count("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"{text.file}: num_attention_heads ({heads}) is not a multiple of "
            f"num_key_value_heads ({kv_heads})"
        )
    head_dim = text.count("head_dim")
    nested = text.values.get("rope_parameters")
    said = nested if isinstance(nested, dict) else text.values
    factor = text.number(
        "partial_rotary_factor", said.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR)
    )
    turning = int(head_dim * factor)
    if factor > 1 or turning % 2 or not turning:
        raise CheckpointError(
            f"{text.file}: partial_rotary_factor is {factor}; of heads of {head_dim} dimensions "
            "that is no number of pairs"
        )
    rope = replace(read_rope(text, turning), dims=turning)
    return Attention(
        heads, kv_heads, head_dim, rope, qk_norm=True, qkv_bias=False, output_gate=True
    )


def _delta(text: ModelConfig) -> GatedDeltaNet:
    keys, values = text.count("linear_num_key_heads"), text.count("linear_num_value_heads")
    if values % keys:
        raise CheckpointError(
            f"{text.file}: linear_num_value_heads ({values}) is not a multiple of "
            f"linear_num_key_heads ({keys})"
        )
    return GatedDeltaNet(
        keys,
        values,
        text.count("linear_key_head_dim"),
        text.count("linear_value_head_dim"),
        text.count("linear_conv_kernel_dim"),
    )
