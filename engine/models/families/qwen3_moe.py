"""Qwen3 MoE: a Qwen3 whose MLPs are mixtures of experts, all of them or every so many."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.experts import mlps_of, read_experts
from engine.models.families.qwen3 import qwen3
from engine.models.spec import ModelSpec


def qwen3_moe(config: ModelConfig) -> ModelSpec:
    """Return the spec of a Qwen3 MoE. Raises CheckpointError."""
    dense, mlps = qwen3(config), mlps_of(config, read_experts(config))
    layers = (replace(its, mlp=mlp) for its, mlp in zip(dense.layers, mlps, strict=True))
    return replace(dense, family="Qwen3 MoE", layers=tuple(layers))
