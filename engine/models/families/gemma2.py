"""Gemma 2, whose scores and logits are capped. Of two layers, the first has a window; mlx-lm's
model, which has none, is a reference up to the window's length."""

from collections.abc import Callable

from engine.models.config import ModelConfig
from engine.models.families.windows import read_windows
from engine.models.rope import read_context, read_rope
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, DenseMlp, Gate, LayerSpec, ModelSpec, Rope

GELU = "gelu_pytorch_tanh"
ROPE_THETA = 10_000.0


def gemma_decoder(
    config: ModelConfig,
    family: str,
    every: int,
    rope_of: Callable[[int | None], Rope],
    *,
    qk_norm: bool,
    embedding_scale: float,
) -> ModelSpec:
    """Return the layers that all Gemmas have. One layer of ``every`` sees all tokens. ``rope_of``
    returns the RoPE of a window. Raises CheckpointError."""
    config.check_choice("hidden_activation", config.values.get("hidden_activation", GELU), (GELU,))
    for field in ("attention_bias", "use_bidirectional_attention"):
        if config.values.get(field):
            raise CheckpointError(f"{config.file}: {field} is true; quire serves Gemmas without")
    heads, kv_heads = config.count("num_attention_heads"), config.count("num_key_value_heads")
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    mlp = DenseMlp(config.count("intermediate_size"), Gate.GELU)
    attentions = (
        Attention(
            heads,
            kv_heads,
            config.count("head_dim"),
            rope_of(window),
            qk_norm,
            qkv_bias=False,
            window=window,
            query_scalar=config.number("query_pre_attn_scalar"),
            softcap=softcap(config, "attn_logit_softcapping"),
        )
        for window in read_windows(config, every)
    )
    return ModelSpec(
        family=family,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(LayerSpec(attention, mlp, post_norms=True) for attention in attentions),
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        norm_eps=config.number("rms_norm_eps"),
        max_position_embeddings=read_context(config),
        norm_offset=1.0,
        embedding_scale=embedding_scale,
        logit_softcap=softcap(config, "final_logit_softcapping"),
    )


def softcap(config: ModelConfig, field: str) -> float:
    """Read a cap of scores or logits; null and a missing field mean none."""
    return 0.0 if config.values.get(field) is None else config.number(field)


def gemma2(config: ModelConfig) -> ModelSpec:
    rope = read_rope(config, config.count("head_dim"), ROPE_THETA)
    scale = config.count("hidden_size") ** 0.5
    return gemma_decoder(config, "Gemma 2", 2, lambda _: rope, qk_norm=False, embedding_scale=scale)
