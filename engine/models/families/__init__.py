"""The supported model families. Each family has a function from ``config.json`` to ModelSpec."""

from collections.abc import Callable

from engine.models.config import ModelConfig
from engine.models.families.gemma2 import gemma2
from engine.models.families.gemma3 import gemma3
from engine.models.families.gpt_oss import gpt_oss
from engine.models.families.llama import llama
from engine.models.families.prism_hadamard_qwen35 import prism_hadamard_qwen35
from engine.models.families.qwen2 import qwen2
from engine.models.families.qwen3 import qwen3
from engine.models.families.qwen3_5 import qwen3_5
from engine.models.families.qwen3_5_moe import qwen3_5_moe
from engine.models.families.qwen3_moe import qwen3_moe
from engine.models.families.qwen3_next import qwen3_next
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[ModelConfig], ModelSpec]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "prism_hadamard_qwen35": prism_hadamard_qwen35,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
}

# The model_type of files with nothing but the head that drafts for a model (Blaizzy/mlx-vlm).
DRAFT_HEAD = "qwen3_5_mtp"
REFUSED = {
    "gemma3n": "its layers have embeddings of their own, and share K and V",
    "phi3": "its matrices are stored joined, and its window is not that of mlx-lm",
}
"""Why models with windows of other families are not served."""


def read_spec(config: ModelConfig) -> ModelSpec:
    """Return the model that ``config.json`` describes. Raises CheckpointError."""
    model_type = config.values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if model_type == DRAFT_HEAD:
        raise CheckpointError(
            f"{config.file}: this is no model, but the head that drafts for a Qwen3.5, 3.6 or 3.8: "
            "serve that model, and name this with --draft"
        )
    if family is None:
        reason = REFUSED.get(str(model_type))
        because = "" if reason is None else f", which is not served: {reason}"
        raise CheckpointError(
            f"{config.file}: model_type is {model_type!r}{because}; quire serves "
            f"models of {', '.join(FAMILIES)}"
        )
    config.refuse_foreign_quantization()
    return family(config)
