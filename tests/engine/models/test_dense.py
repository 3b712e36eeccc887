"""A decoder after Llama has what its family says, and the sizes of its ``config.json``."""

from pathlib import Path

import pytest

from engine.models.config import ModelConfig
from engine.models.dense import dense_decoder
from engine.models.safetensors_headers import CheckpointError
from tests.models import TINY, write_config


@pytest.mark.parametrize("has", [True, False])
def test_norms_and_biases_are_the_familys_own(tmp_path: Path, has: bool) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    spec = dense_decoder(config, "Other", 16, qk_norm=has, qkv_bias=not has)
    assert spec.family == "Other"
    for its in spec.attentions:
        assert (its.qk_norm, its.qkv_bias) == (has, not has)
        assert (its.head_dim, its.window) == (16, None)


def test_heads_that_do_not_share_evenly_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY, num_key_value_heads=3))
    with pytest.raises(CheckpointError, match=r"\(2\) is not a multiple of .* \(3\)"):
        dense_decoder(config, "Other", 16, qk_norm=False, qkv_bias=False)
