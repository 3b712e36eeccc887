"""Llama 3 and similar dense models, without biases and without norms of queries and keys."""

from engine.models.config import ModelConfig
from engine.models.families.qwen3 import dense_decoder
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import ModelSpec

# RoPE's base if config.json has no rope_theta, as in older models (mlx_lm.models.llama).
ROPE_THETA = 10_000.0


def llama(config: ModelConfig) -> ModelSpec:
    for field in ("attention_bias", "mlp_bias"):
        if config.values.get(field):
            raise CheckpointError(f"{config.file}: {field} is true; quire serves Llamas without")
    head_dim = config.values.get("head_dim")
    if head_dim is None:
        head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    else:
        head_dim = config.count("head_dim")
    has = {"qk_norm": False, "qkv_bias": False}
    return dense_decoder(config, "Llama", head_dim, **has, rope_theta=ROPE_THETA, tied=True)
