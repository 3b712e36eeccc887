"""A Qwen3 MoE's ``config.json`` becomes a spec, or is refused by the name of the field."""

from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import DenseMlp, Experts
from tests.families import QWEN3_MOE
from tests.models import ModelSpec, write_config

SIX_LAYERS = ModelSpec(num_hidden_layers=6)
EXPERTS = Experts(8, 3, inner_size=64, normalised=True)


def test_layers_have_experts_or_a_dense_mlp_as_the_config_says(tmp_path: Path) -> None:
    fields = QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = read_spec(ModelConfig(write_config(tmp_path, SIX_LAYERS, **fields)))
    assert spec.family == "Qwen3 MoE"
    dense = DenseMlp(128)
    assert [its.mlp for its in spec.layers] == [dense, EXPERTS, dense, dense, dense, EXPERTS]
    assert all(its.qk_norm for its in spec.attentions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, r"config.json: num_experts is 0; it must be a number above 0"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_experts \(8\)"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size is None"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob is 1; it must be true or false"),
        ({"decoder_sparse_step": ...}, r"decoder_sparse_step is None"),
        ({"mlp_only_layers": 3}, r"mlp_only_layers is 3; it must be a list"),
    ],
)
def test_fault_16_a_broken_config_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_config(tmp_path, SIX_LAYERS, **(QWEN3_MOE | changes))
    with pytest.raises(CheckpointError, match=message):
        read_spec(ModelConfig(folder))
