"""What mixtures of experts have in common in their ``config.json``."""

from engine.models.config import ModelConfig
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Experts


def read_experts(config: ModelConfig, shared_inner_size: int | None = None) -> Experts:
    """Return the mixture of the layers that have one. Raises CheckpointError."""
    experts, chosen = config.count("num_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"{config.file}: num_experts_per_tok ({chosen}) is more than num_experts ({experts})"
        )
    return Experts(
        experts,
        chosen,
        inner_size=config.count("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob"),
        shared_inner_size=shared_inner_size,
    )
