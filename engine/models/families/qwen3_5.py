"""Qwen3.5 and 3.6, dense: a hybrid."""

from engine.models.config import ModelConfig
from engine.models.hybrid import hybrid_decoder
from engine.models.spec import DenseMlp, ModelSpec


def qwen3_5(config: ModelConfig) -> ModelSpec:
    """Return the spec of a Qwen3.5. Raises CheckpointError."""
    text = config.text
    mlp = DenseMlp(text.count("intermediate_size"))
    mlps = [mlp] * text.count("num_hidden_layers")
    return hybrid_decoder(text, "Qwen3.5", mlps, parameters_first=True)
