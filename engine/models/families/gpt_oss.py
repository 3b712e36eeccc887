"""gpt-oss, mixtures of experts with biases. Of two attention layers, the first has a window."""

from engine.models.config import ModelConfig
from engine.models.families.windows import read_windows
from engine.models.rope import read_context, read_rope
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, Experts, Gate, LayerSpec, ModelSpec

# The limit of the kernels' gate (metal_ext.gated_mlp).
SWIGLU_LIMIT = 7.0


def gpt_oss(config: ModelConfig) -> ModelSpec:
    limit, biased = config.values.get("swiglu_limit"), config.values.get("attention_bias")
    config.check_choice("swiglu_limit", limit, (None, SWIGLU_LIMIT))
    config.check_choice("attention_bias", biased, (None, True))
    heads, kv_heads = config.count("num_attention_heads"), config.count("num_key_value_heads")
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"{config.file}: num_experts_per_tok ({chosen}) is more than num_local_experts "
            f"({experts})"
        )
    # The softmax over the chosen experts alone is that over all, divided by the sum of the chosen.
    mixture = Experts(
        experts,
        chosen,
        inner_size=config.count("intermediate_size"),
        normalised=True,
        gate=Gate.CLAMPED_SILU,
        biases=True,
    )
    head_dim = config.count("head_dim")
    rope = read_rope(config, head_dim)
    attentions = (
        Attention(
            heads,
            kv_heads,
            head_dim,
            rope,
            qk_norm=False,
            qkv_bias=True,
            window=window,
            output_bias=True,
            sinks=True,
        )
        for window in read_windows(config, 2)
    )
    return ModelSpec(
        family="gpt-oss",
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(LayerSpec(attention, mixture) for attention in attentions),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        norm_eps=config.number("rms_norm_eps"),
        max_position_embeddings=read_context(config),
    )
