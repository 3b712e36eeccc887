"""Qwen3, dense: queries and keys take a norm, and nothing has a bias."""

from engine.models.config import ModelConfig
from engine.models.dense import dense_decoder
from engine.models.spec import ModelSpec


def qwen3(config: ModelConfig) -> ModelSpec:
    """Return the spec of a Qwen3. Raises CheckpointError."""
    config.refuse_windows()
    head_dim = config.count("head_dim")
    return dense_decoder(config, "Qwen3", head_dim, qk_norm=True, qkv_bias=False)
