"""Qwen3.5 and 3.6, dense models that mix attention layers and gated delta nets."""

from collections.abc import Sequence
from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.rope import read_context, read_rope, rope_number
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, DenseMlp, GatedDeltaNet, LayerSpec, Mixer, Mlp, ModelSpec

IMAGES = "images"
# Name prefixes of tensors that are not needed to serve text, with the purpose of these tensors.
UNREAD = (("model.visual.", IMAGES), ("vision_tower.", IMAGES))
# Every fourth layer is an attention layer, unless config.json has another interval.
ATTENTION_INTERVAL = 4
PARTIAL_ROTARY_FACTOR = 0.25
# The kernels need delta net heads whose number of dimensions is a multiple of this.
HEAD_DIM_UNIT = 16
MAX_HEAD_DIM = 256


def hybrid_decoder(
    text: ModelConfig, family: str, mlps: Sequence[Mlp], *, parameters_first: bool
) -> ModelSpec:
    """Return a model of attention layers and gated delta nets. ``mlps`` has each layer's MLP. With
    ``parameters_first``, ``rope_parameters`` overrides other fields. Raises CheckpointError."""
    layers = zip(_mixers(text, parameters_first), mlps, strict=True)
    return ModelSpec(
        family=family,
        vocab_size=text.count("vocab_size"),
        hidden_size=text.count("hidden_size"),
        layers=tuple(LayerSpec(mixer, mlp) for mixer, mlp in layers),
        tied_embeddings=text.flag("tie_word_embeddings", default=False),
        norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=read_context(text),
        unread=UNREAD,
    )


def _mixers(text: ModelConfig, parameters_first: bool) -> list[Mixer]:
    attention, delta = _attention(text, parameters_first), _delta(text)
    interval = ATTENTION_INTERVAL
    if "full_attention_interval" in text.values:
        interval = text.count("full_attention_interval")
    layers = range(1, text.count("num_hidden_layers") + 1)
    mixers: list[Mixer] = [delta if number % interval else attention for number in layers]
    kinds = ["linear_attention" if mixer is delta else "full_attention" for mixer in mixers]
    if text.values.get("layer_types", kinds) != kinds:
        raise CheckpointError(
            f"{text.file}: layer_types are not those of full_attention_interval {interval}"
        )
    return mixers


def _attention(text: ModelConfig, parameters_first: bool) -> Attention:
    if text.values.get("attention_bias"):
        raise CheckpointError(f"{text.file}: attention_bias is true; quire serves Qwens without")
    heads, kv_heads = text.count("num_attention_heads"), text.count("num_key_value_heads")
    text.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = text.count("head_dim")
    factor = rope_number(
        text, "partial_rotary_factor", PARTIAL_ROTARY_FACTOR, parameters_first=parameters_first
    )
    turning = int(head_dim * factor)
    if factor > 1 or turning % 2 or not turning:
        raise CheckpointError(
            f"{text.file}: partial_rotary_factor is {factor}; of heads of {head_dim} dimensions "
            "that is no number of pairs"
        )
    rope = replace(read_rope(text, turning, parameters_first=parameters_first), dims=turning)
    return Attention(
        heads, kv_heads, head_dim, rope, qk_norm=True, qkv_bias=False, output_gate=True
    )


def _delta(text: ModelConfig) -> GatedDeltaNet:
    keys, values = text.count("linear_num_key_heads"), text.count("linear_num_value_heads")
    text.check_multiple("linear_num_value_heads", values, "linear_num_key_heads", keys)
    for field in ("linear_key_head_dim", "linear_value_head_dim"):
        size = text.count(field)
        if size % HEAD_DIM_UNIT or size > MAX_HEAD_DIM:
            raise CheckpointError(
                f"{text.file}: {field} is {size}; quire serves multiples of {HEAD_DIM_UNIT} up to "
                f"{MAX_HEAD_DIM}"
            )
    return GatedDeltaNet(
        keys,
        values,
        text.count("linear_key_head_dim"),
        text.count("linear_value_head_dim"),
        text.count("linear_conv_kernel_dim"),
    )


def qwen3_5(config: ModelConfig) -> ModelSpec:
    text = config.text
    mlp = DenseMlp(text.count("intermediate_size"))
    mlps = [mlp] * text.count("num_hidden_layers")
    return hybrid_decoder(text, "Qwen3.5", mlps, parameters_first=True)
