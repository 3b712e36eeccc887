"""Qwen3.5 and 3.6 MoE. Unlike in Qwen3.5, the MLPs are mixtures of experts with a shared expert."""

from engine.models.config import ModelConfig
from engine.models.families.qwen3_5 import hybrid_decoder
from engine.models.families.qwen3_moe import read_experts
from engine.models.spec import ModelSpec


def qwen3_5_moe(config: ModelConfig) -> ModelSpec:
    text = config.text
    experts = read_experts(text, shared=True, normalised=True)
    mlps = [experts] * text.count("num_hidden_layers")
    return hybrid_decoder(text, "Qwen3.5 MoE", mlps, parameters_first=True)
