"""Qwen3 MoE: a Qwen3 whose MLPs are mixtures of experts, all of them or every so many."""

from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.experts import read_experts
from engine.models.families.qwen3 import qwen3
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Mlp, ModelSpec


def qwen3_moe(config: ModelConfig) -> ModelSpec:
    """Return the spec of a Qwen3 MoE. Raises CheckpointError."""
    dense = qwen3(config)
    experts, step = read_experts(config), config.count("decoder_sparse_step")
    only = config.values.get("mlp_only_layers", [])
    if not isinstance(only, list):
        raise CheckpointError(
            f"{config.file}: mlp_only_layers is {only!r}; it must be a list of layers' numbers"
        )

    def mlp_of(number: int, its: Mlp) -> Mlp:
        sparse = number not in only and (number + 1) % step == 0
        return experts if sparse else its

    layers = (replace(its, mlp=mlp_of(n, its.mlp)) for n, its in enumerate(dense.layers))
    return replace(dense, family="Qwen3 MoE", layers=tuple(layers))
