"""Qwen3, a dense model whose queries and keys have norms. No layer has a bias."""

from engine.models.config import ModelConfig
from engine.models.rope import read_context, read_rope
from engine.models.spec import Attention, DenseMlp, LayerSpec, ModelSpec


def dense_decoder(
    config: ModelConfig,
    family: str,
    head_dim: int,
    *,
    qk_norm: bool,
    qkv_bias: bool,
    rope_theta: float | None = None,
    tied: bool | None = None,
) -> ModelSpec:
    """Return a model of equal layers. ``rope_theta`` and ``tied`` are defaults for fields missing
    in the config; with None, a missing field is an error. Raises CheckpointError."""
    eps, rope = config.number("rms_norm_eps"), read_rope(config, head_dim, rope_theta)
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    attention = Attention(heads, kv_heads, head_dim, rope, qk_norm, qkv_bias)
    layer = LayerSpec(attention, DenseMlp(config.count("intermediate_size")))
    return ModelSpec(
        family=family,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=(layer,) * config.count("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", tied),
        norm_eps=eps,
        max_position_embeddings=read_context(config),
    )


def qwen3(config: ModelConfig) -> ModelSpec:
    config.refuse_windows()
    head_dim = config.count("head_dim")
    return dense_decoder(config, "Qwen3", head_dim, qk_norm=True, qkv_bias=False)
