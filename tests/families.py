"""Fields of config.json that make a checkpoint of random weights a mixture of experts or a hybrid,
the hub's names of experts' tensors, and the dimensions of published models."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.models import ModelSpec, write_config

DELTA: dict[str, Any] = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
FIELDS: dict[str, Any] = DELTA | {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "rope_theta": ...,
}
HYBRID = FIELDS | {"num_hidden_layers": 3}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
QWEN3_5_MOE: dict[str, Any] = (
    FIELDS
    | EXPERTS
    | {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "intermediate_size": ...,
    }
)
QWEN3_NEXT: dict[str, Any] = (
    DELTA
    | EXPERTS
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    }
)


BONSAI: dict[str, Any] = {
    "model_type": "prism_hadamard_qwen35",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "schema_version": 2,
    "tensor_namespace": "mlx-vlm-qwen3_5",
    "gdn_activation_layout": "grouped",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
}


def bonsai_modules(layers: int, interval: int, block: int) -> list[dict[str, Any]]:
    """The manifest of a pack of Bonsai 2 with a head of its own."""
    names = ["lm_head", "model.embed_tokens"]
    for number in range(layers):
        mixer = ["linear_attn." + each for each in ("in_proj_qkv", "in_proj_z", "out_proj")]
        if (number + 1) % interval == 0:
            mixer = [f"self_attn.{each}_proj" for each in "qkvo"]
        mlp = [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
        names += [f"model.layers.{number}.{each}" for each in (*mixer, *mlp)]
    return [
        {"path": name, "block": block, "embedding": "embed" in name, "dtype": "float16"}
        for name in names
    ]


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
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "sliding_window": 40,
    "rope_theta": ...,
    "tie_word_embeddings": ...,
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "query_pre_attn_scalar": 256,
    "sliding_window": 40,
    "sliding_window_pattern": 3,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "tie_word_embeddings": ...,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 40,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
    },
}
ROUTERS = {"mlp.gate": {"bits": 8, "group_size": 64}}
"""As mlx-lm packs them beside experts of 4 bits."""

Arrays = dict[str, mx.array]


def names_apart(folder: Path, file: str = "model.safetensors") -> Path:
    """Store Qwen3's names of the hub: a tensor for each expert."""

    def split(name: str, stack: mx.array) -> Arrays:
        above, _, last = name.partition(".switch_mlp.")
        return {f"{above}.experts.{e}.{last}": stack[e] for e in range(len(stack))}

    return _renamed(folder, split, file=file)


def names_fused(folder: Path, file: str = "model.safetensors") -> Path:
    """Store Qwen3.5's names of the hub: gate and up in one tensor."""
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

    return _renamed(folder, joined, file=file)


def names_in_blocks(folder: Path) -> Path:
    """Store gpt-oss's experts as the hub does: in blocks of MXFP4, rows of gate and up in turn."""

    def packed(name: str, array: mx.array) -> Arrays:
        above, _, place = name.partition(".mlp.experts.")
        which, _, kind = place.partition("_proj.")
        if which in ("gate", "up"):
            kept[above + kind + which] = array
            both = [kept.get(above + kind + each) for each in ("gate", "up")]
            if both[0] is None or both[1] is None:
                return {}
            array, which = mx.stack([both[0], both[1]], axis=2).flatten(1, 2), "gate_up"
        start = f"{above}.mlp.experts.{which}_proj"
        if kind == "bias":
            return {f"{start}_bias": array}
        words, scales, *_ = mx.quantize(array, 32, 4, mode="mxfp4")
        blocks = words.view(mx.uint8).reshape(*scales.shape, 16)
        return {f"{start}_blocks": blocks, f"{start}_scales": scales}

    kept: Arrays = {}
    _change_config(
        folder, lambda values: values | {"quantization_config": {"quant_method": "mxfp4"}}
    )
    return _renamed(folder, packed, ".mlp.experts.")


def nests_text(folder: Path) -> Path:
    """Store Gemma 3 as a part of a model with images."""
    file = str(folder / "model.safetensors")
    weights: Arrays = mx.load(file)  # type: ignore[assignment]
    weights = {f"language_model.{name}": array for name, array in weights.items()}
    weights |= {"vision_tower.a": mx.ones((4,)), "multi_modal_projector.b": mx.ones((4,))}
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    outer = {"model_type": "gemma3", "vision_config": {}}
    kept = ("architectures", "vocab_size", "quantization")
    _change_config(
        folder,
        lambda values: (
            outer | {"text_config": values} | {key: values[key] for key in kept if key in values}
        ),
    )
    return folder


def _change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _renamed(
    folder: Path,
    change: Callable[[str, mx.array], Arrays],
    within: str = ".switch_mlp.",
    file: str = "model.safetensors",
) -> Path:
    stored: Arrays = mx.load(str(folder / file))  # type: ignore[assignment]
    arrays: Arrays = {}
    for name, array in stored.items():
        arrays |= change(name, array) if within in name else {name: array}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / file), arrays, {"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True)
class Published:
    spec: ModelSpec
    fields: dict[str, Any] = field(default_factory=dict)
    """Of config.json, where it is no dense Qwen3."""

    def write(self, folder: Path, **changes: Any) -> Path:
        """Write the model's folder without weights. changes: further fields."""
        return write_config(folder, self.spec, **(self.fields | changes))


PUBLISHED_DELTA = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN3_5_4B = ModelSpec(
    num_hidden_layers=32,
    hidden_size=2560,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    intermediate_size=9216,
    vocab_size=248320,
    max_position_embeddings=262144,
)
QWEN3_6_27B = replace(
    QWEN3_5_4B,
    num_hidden_layers=64,
    hidden_size=5120,
    num_attention_heads=24,
    intermediate_size=17408,
    tie_word_embeddings=False,
)
PUBLISHED = {
    "Qwen3-30B-A3B": Published(
        ModelSpec(
            num_hidden_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
        QWEN3_MOE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen3.5-0.8B": Published(
        replace(
            QWEN3_5_4B,
            num_hidden_layers=24,
            hidden_size=1024,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=3584,
        ),
        FIELDS | PUBLISHED_DELTA | {"linear_num_value_heads": 16},
    ),
    "Qwen3.5-4B": Published(QWEN3_5_4B, FIELDS | PUBLISHED_DELTA),
    "Qwen3.6-27B": Published(
        QWEN3_6_27B,
        FIELDS | PUBLISHED_DELTA | {"linear_num_value_heads": 48},
    ),
    "Bonsai-2-27B": Published(
        QWEN3_6_27B,
        FIELDS
        | PUBLISHED_DELTA
        | {"linear_num_value_heads": 48, "modules": bonsai_modules(64, 4, 1024)}
        | BONSAI,
    ),
    "Qwen3.6-35B-A3B": Published(
        replace(
            QWEN3_5_4B,
            num_hidden_layers=40,
            hidden_size=2048,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        ),
        QWEN3_5_MOE
        | PUBLISHED_DELTA
        | {
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
