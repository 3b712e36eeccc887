"""A Qwen3 MoE's ``config.json`` becomes a spec."""

from pathlib import Path

from engine.models.config import ModelConfig
from engine.models.families import read_spec
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
