"""A Qwen2's ``config.json`` becomes a spec, and its answers are mlx-lm's."""

from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, DenseMlp, LayerSpec, Rope
from tests.engine.models.families.greedy import TIED_OR_PACKED, check_greedy_answers
from tests.models import TINY, write_config


@pytest.mark.parametrize(("tied", "how"), TIED_OR_PACKED, ids=str)
def test_greedy_answers_equal_mlx_lms_alone_and_together(
    tmp_path: Path, tied: bool, how: dict[str, Any]
) -> None:
    check_greedy_answers(tmp_path, tied=tied, model_type="qwen2", head_dim=..., **how)


def test_a_qwen2_has_biases_and_no_norms(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, TINY, model_type="qwen2", head_dim=...)))
    attention = Attention(2, 1, 32, Rope(1_000_000.0), qk_norm=False, qkv_bias=True)
    assert (spec.family, spec.layers) == ("Qwen2", (LayerSpec(attention, DenseMlp(128)),) * 2)


def test_a_qwen2_whose_attention_sees_only_the_newest_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, TINY, model_type="qwen2", use_sliding_window=True)
    with pytest.raises(CheckpointError, match="use_sliding_window is true"):
        read_spec(ModelConfig(folder))
