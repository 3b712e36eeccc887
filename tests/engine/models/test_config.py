"""``config.json`` says how weights are packed."""

from pathlib import Path

import mlx.core as mx
import pytest

from engine.models.config import MODES, ModelConfig, Quantization
from tests.models import TINY, write_config


def test_how_a_layer_is_packed_is_said_once_or_for_it_alone(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    assert config.quantization("model.norm") is None
    packed = {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}}
    config = ModelConfig(write_config(tmp_path, TINY, quantization=packed))
    assert config.quantization("model.embed_tokens") == Quantization(4, 64)
    assert config.quantization("lm_head") == Quantization(8, 32)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_mlxs_is_known(tmp_path: Path, mode: str) -> None:
    bits, group_sizes = MODES[mode]
    for number in bits:
        size = group_sizes[-1]
        mx.quantize(mx.ones((1, 128)), size, number, mode)
        packed = {"bits": number, "group_size": size, "mode": mode}
        config = ModelConfig(write_config(tmp_path, TINY, quantization=packed))
        assert config.quantization("lm_head") == Quantization(number, size, mode)
