"""What makes a checkpoint of random weights a hybrid: fields of config.json, without a model."""

from typing import Any

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
