"""A Qwen3-Next's ``config.json`` becomes a spec."""

from pathlib import Path

from engine.models.checkpoint import read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.spec import Attention, DenseMlp, Experts, GatedDeltaNet
from tests.engine.models.hybrids import QWEN3_NEXT, SPEC, write_hybrid
from tests.models import write_config


def test_layers_have_experts_or_a_dense_mlp_as_the_config_says(tmp_path: Path) -> None:
    fields = QWEN3_NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = read_spec(ModelConfig(write_config(tmp_path, SPEC, **fields)))
    experts = Experts(8, 3, inner_size=64, normalised=True, shared_inner_size=128)
    dense = DenseMlp(256)
    assert spec.family == "Qwen3-Next"
    assert [its.mlp for its in spec.layers] == [dense, experts, dense, dense, dense, experts]
    assert set(spec.recurrences) == {GatedDeltaNet(2, 4, 32, 32, 4)}
    kinds = [type(its.mixer) for its in spec.layers]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, Attention] * 2
    assert spec.attentions[0].rope.dims == 16


def test_inputs_of_a_delta_net_are_two_matrices_by_key_heads(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_hybrid(tmp_path, hub=True, **QWEN3_NEXT))
    assert checkpoint.naming.joined_deltas
    shapes = checkpoint.tensors.shapes
    at = "model.layers.0.linear_attn"
    assert shapes[f"{at}.in_proj_qkvz.weight"] == (2 * 2 * 32 + 2 * 4 * 32, 128)
    assert shapes[f"{at}.in_proj_ba.weight"] == (2 * 4, 128)
    assert checkpoint.left_out == (
        "Qwen3-Next is served without what its files have for drafts of tokens (1 tensor)"
    )
