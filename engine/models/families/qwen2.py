"""Qwen2 and Qwen2.5, dense models whose queries, keys and values have biases, but no norms."""

from engine.models.config import ModelConfig
from engine.models.families.qwen3 import dense_decoder
from engine.models.spec import ModelSpec


def qwen2(config: ModelConfig) -> ModelSpec:
    config.refuse_windows()
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    return dense_decoder(config, "Qwen2", head_dim, qk_norm=False, qkv_bias=True)
