"""Qwen3-Next and Qwen3-Coder-Next. They differ from Qwen3.5 MoE in that some MLPs may be dense."""

from engine.models.config import ModelConfig
from engine.models.families.qwen3_5 import hybrid_decoder
from engine.models.families.qwen3_moe import mlps_of, read_experts
from engine.models.spec import ModelSpec


def qwen3_next(config: ModelConfig) -> ModelSpec:
    mlps = mlps_of(config, read_experts(config, shared=True))
    return hybrid_decoder(config, "Qwen3-Next", mlps, parameters_first=False)
