"""A Qwen3's ``config.json`` becomes a spec."""

from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.families.qwen3 import dense_decoder
from engine.models.spec import Attention, DenseMlp, LayerSpec, Rope
from tests.engine.models.families.greedy import STORAGES, check_greedy_answers
from tests.models import TINY, write_config


@pytest.mark.parametrize("how", STORAGES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_answers_with_yarn_equal_mlx_lms_alone_and_together(
    tmp_path: Path, how: dict[str, Any], tied: bool
) -> None:
    """As Qwen says that contexts are to be made longer; in a shorter one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    check_greedy_answers(tmp_path, tied=tied, rope_scaling=yarn, seed=12, **how)


def test_all_layers_are_alike_with_norms_and_without_biases(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, TINY)))
    attention = Attention(2, 1, 32, Rope(1_000_000.0), qk_norm=True, qkv_bias=False)
    assert spec.layers == (LayerSpec(attention, DenseMlp(128)),) * 2
    assert (spec.family, spec.norm_eps, spec.tied_embeddings) == ("Qwen3", 1e-6, True)
    assert (spec.vocab_size, spec.hidden_size) == (TINY.vocab_size, TINY.hidden_size)
    assert spec.max_position_embeddings == TINY.max_position_embeddings


# Some layers of a model that mlx-lm would mix, and an embedding that it would not.
MIXED = {
    "v_proj": {"bits": 6, "group_size": 64},
    "down_proj": {"bits": 8, "group_size": 128},
    "0.self_attn.q_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "1.mlp.up_proj": False,
    "embed_tokens": {"bits": 5, "group_size": 32},
}


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"bits": 2},
        {"bits": 3, "group_size": 64},
        {"bits": 4, "group_size": 128, "dtype": "float16"},
        {"bits": 5, "group_size": 128},
        {"bits": 6, "group_size": 64},
        {"bits": 8, "group_size": 128},
        {"bits": 3, "group_size": 64, "layers": MIXED},
        {"bits": 4, "mode": "mxfp4"},
        {"bits": 8, "mode": "mxfp8"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    ],
    ids=str,
)
def test_greedy_answers_equal_mlx_lms_however_weights_are_stored(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    check_greedy_answers(tmp_path, tied=True, lengths=(65, 200), **{"dtype": "bfloat16"} | how)


@pytest.mark.parametrize("has", [True, False])
def test_norms_and_biases_are_the_familys_own(tmp_path: Path, has: bool) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    spec = dense_decoder(config, "Other", 16, qk_norm=has, qkv_bias=not has)
    assert spec.family == "Other"
    for its in spec.attentions:
        assert (its.qk_norm, its.qkv_bias) == (has, not has)
        assert (its.head_dim, its.window) == (16, None)
