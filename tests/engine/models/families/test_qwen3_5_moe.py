"""A Qwen3.5 MoE's ``config.json`` becomes a spec."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.models.checkpoint import read_checkpoint
from engine.models.config import ModelConfig
from engine.models.expert_tensors import ExpertNames
from engine.models.families import read_spec
from engine.models.spec import Experts
from tests.engine.models.hybrids import QWEN3_5_MOE, SPEC, write_hybrid
from tests.models import write_config


@pytest.mark.parametrize(("said", "normalised"), [({}, True), ({"norm_topk_prob": False}, False)])
def test_every_layer_has_experts_and_a_shared_one(
    tmp_path: Path, said: dict[str, Any], normalised: bool
) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, SPEC, **(QWEN3_5_MOE | said))))
    experts = Experts(8, 3, inner_size=64, normalised=normalised, shared_inner_size=128)
    assert spec.family == "Qwen3.5 MoE"
    assert [its.mlp for its in spec.layers] == [experts] * 6


def test_names_of_experts_in_what_is_not_read_say_nothing(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, hub=True, **QWEN3_5_MOE)
    drafts = {"mtp.layers.0.mlp.experts.0.up_proj.weight": mx.ones((4,))}
    mx.save_safetensors(str(folder / "model-0.safetensors"), drafts)  # read before all others
    checkpoint = read_checkpoint(folder)
    assert checkpoint.naming.experts is ExpertNames.FUSED
    assert len(checkpoint.unread) == 3
