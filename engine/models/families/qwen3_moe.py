"""Qwen3 MoE. It differs from Qwen3 in that all or some MLPs are mixtures of experts."""

from collections.abc import Sequence
from dataclasses import replace

from engine.models.config import ModelConfig
from engine.models.families.qwen3 import qwen3
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import DenseMlp, Experts, Mlp, ModelSpec


def read_experts(
    config: ModelConfig, *, shared: bool = False, normalised: bool | None = None
) -> Experts:
    """Read a mixture of experts. With ``shared``, one more expert computes every token.
    ``normalised`` is the default of ``norm_topk_prob``; None makes a missing field an error."""
    experts, chosen = config.count("num_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"{config.file}: num_experts_per_tok ({chosen}) is more than num_experts ({experts})"
        )
    return Experts(
        experts,
        chosen,
        inner_size=config.count("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob", normalised),
        shared_inner_size=config.count("shared_expert_intermediate_size") if shared else None,
    )


def mlps_of(config: ModelConfig, experts: Experts) -> Sequence[Mlp]:
    """Return the MLP of each layer. Layers at multiples of decoder_sparse_step have experts, unless
    mlp_only_layers names them; other layers have dense MLPs."""
    dense, step = DenseMlp(config.count("intermediate_size")), config.count("decoder_sparse_step")
    only = config.values.get("mlp_only_layers", [])
    if not isinstance(only, list):
        raise CheckpointError(
            f"{config.file}: mlp_only_layers is {only!r}; it must be a list of layers' numbers"
        )
    layers = range(config.count("num_hidden_layers"))
    return [
        experts if number not in only and (number + 1) % step == 0 else dense for number in layers
    ]


def qwen3_moe(config: ModelConfig) -> ModelSpec:
    dense, mlps = qwen3(config), mlps_of(config, read_experts(config))
    layers = (replace(layer, mlp=mlp) for layer, mlp in zip(dense.layers, mlps, strict=True))
    return replace(dense, family="Qwen3 MoE", layers=tuple(layers))
