"""Whose ``config.json`` is broken is refused by the name of the field."""

from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from tests.engine.models.hybrids import FIELDS, QWEN3_5_MOE, QWEN3_NEXT, SPEC
from tests.families import QWEN3_MOE
from tests.models import TINY, ModelSpec, write_config

# Invalid fields of config.json (...: the field is missing), and the error messages.
Rows = list[tuple[dict[str, Any], str]]
ROPE = FIELDS["rope_parameters"]
DENSE: Rows = [
    ({"model_type": "gpt2"}, r"config.json: model_type is 'gpt2'"),
    ({"head_dim": ...}, r"config.json: head_dim is None"),
    ({"hidden_size": "64"}, r"config.json: hidden_size is '64'"),
    ({"vocab_size": True}, r"config.json: vocab_size is True"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; .* above 0"),
    ({"tie_word_embeddings": 1}, r"tie_word_embeddings is 1"),
    ({"tie_word_embeddings": ...}, r"tie_word_embeddings is None"),
    ({"rope_theta": ...}, r"config.json: rope_theta is None"),
    ({"rope_theta": "x"}, r"config.json: rope_theta is 'x'"),
    ({"rms_norm_eps": ...}, r"config.json: rms_norm_eps is None"),
    (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        r"num_attention_heads \(3\) is not a multiple of num_key_value_heads \(2\)",
    ),
    ({"use_sliding_window": True}, r"use_sliding_window is true; quire"),
    (
        {"quantization_config": {"quant_method": "awq"}},
        r"quantization_config.quant_method is 'awq'",
    ),
]
OF_QWEN3_MOE: Rows = [
    ({"num_experts": 0}, r"config.json: num_experts is 0; it must be a number above 0"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_experts \(8\)"),
    ({"moe_intermediate_size": None}, r"moe_intermediate_size is None"),
    ({"norm_topk_prob": 1}, r"norm_topk_prob is 1; it must be true or false"),
    ({"decoder_sparse_step": ...}, r"decoder_sparse_step is None"),
    ({"mlp_only_layers": 3}, r"mlp_only_layers is 3; it must be a list"),
]
OF_QWEN3_NEXT: Rows = [
    ({"norm_topk_prob": ...}, "norm_topk_prob is None; it must be true or false"),
    ({"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a number above 0"),
]
OF_QWEN3_5: Rows = [
    ({"text_config": 3}, "text_config is 3; it must be an object"),
    ({"attention_bias": True}, "attention_bias is true"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of .*\(3\)"),
    ({"linear_num_key_heads": 3}, r"linear_num_value_heads \(4\) is not a multiple .*\(3\)"),
    ({"layer_types": ["full_attention"] * 6}, "layer_types are not those of .* 3"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "no number of pairs"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.01}}, "no number of pairs"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.05}}, "no number of pairs"),
    ({"linear_conv_kernel_dim": ...}, "linear_conv_kernel_dim is None"),
    ({"linear_key_head_dim": 24}, "linear_key_head_dim is 24; quire serves multiples of 16"),
    ({"linear_value_head_dim": 272}, "linear_value_head_dim is 272; .* up to 256"),
]
OF_QWEN3_5_MOE: Rows = [
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0; it must"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_experts \(8\)"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
]
BROKEN = [
    (spec, fields | changes, message)
    for spec, fields, rows in (
        (TINY, {}, DENSE),
        (ModelSpec(num_hidden_layers=6), QWEN3_MOE, OF_QWEN3_MOE),
        (SPEC, QWEN3_NEXT, OF_QWEN3_NEXT),
        (SPEC, FIELDS, OF_QWEN3_5),
        (SPEC, QWEN3_5_MOE, OF_QWEN3_5_MOE),
    )
    for changes, message in rows
]


@pytest.mark.parametrize(("spec", "fields", "message"), BROKEN)
def test_fault_16_a_broken_config_is_refused_by_name(
    tmp_path: Path, spec: ModelSpec, fields: dict[str, Any], message: str
) -> None:
    folder = write_config(tmp_path, spec, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_spec(ModelConfig(folder))
    assert "\n" not in str(caught.value)
