"""What makes a checkpoint of random weights one of experts, and the names on the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Fields of config.json."""
ROUTERS = {"mlp.gate": {"bits": 8, "group_size": 64}}
"""As mlx-lm packs them beside experts of 4 bits."""

Arrays = dict[str, mx.array]


def names_apart(folder: Path) -> Path:
    """Qwen3's names on the hub: a tensor for each expert."""

    def split(name: str, stack: mx.array) -> Arrays:
        above, _, last = name.partition(".switch_mlp.")
        return {f"{above}.experts.{e}.{last}": stack[e] for e in range(len(stack))}

    return _renamed(folder, split)


def names_fused(folder: Path) -> Path:
    """Qwen3.5's names on the hub: gate and up in one tensor."""
    kept: Arrays = {}

    def joined(name: str, stack: mx.array) -> Arrays:
        above, _, last = name.partition(".switch_mlp.")
        if last.startswith("down"):
            return {f"{above}.experts.down_proj": stack}
        kept[name] = stack
        both = [kept.get(f"{above}.switch_mlp.{which}_proj.weight") for which in ("gate", "up")]
        if both[0] is None or both[1] is None:
            return {}
        return {f"{above}.experts.gate_up_proj": mx.concatenate([both[0], both[1]], axis=1)}

    return _renamed(folder, joined)


def _renamed(folder: Path, change: Callable[[str, mx.array], Arrays]) -> Path:
    file = str(folder / "model.safetensors")
    stored: Arrays = mx.load(file)  # type: ignore[assignment]
    arrays: Arrays = {}
    for name, array in stored.items():
        arrays |= change(name, array) if ".switch_mlp." in name else {name: array}
    mx.eval(arrays)
    mx.save_safetensors(file, arrays, {"format": "pt"})
    return folder
