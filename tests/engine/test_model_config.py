"""``config.json`` is refused in one sentence that names file and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model_config import ModelConfig, Quantization, expected_shapes
from engine.safetensors_headers import CheckpointError
from tests.models import TINY, write_config


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """A folder with that config; a field that is ... is not in it."""
    file = write_config(folder, TINY) / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


# (what, fields of config.json that are not as they should be; ...: missing, what is said)
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("another model", {"model_type": "llama"}, r"config.json: model_type is 'llama'"),
    ("a field is missing", {"head_dim": ...}, r"config.json: head_dim is None"),
    ("a field is a string", {"hidden_size": "64"}, r"config.json: hidden_size is '64'"),
    ("a field is true", {"vocab_size": True}, r"config.json: vocab_size is True"),
    ("a field is zero", {"num_hidden_layers": 0}, r"num_hidden_layers is 0; .* above 0"),
    ("tied is a number", {"tie_word_embeddings": 1}, r"tie_word_embeddings is 1"),
    ("tied is missing", {"tie_word_embeddings": ...}, r"tie_word_embeddings is None"),
    ("no rope base", {"rope_theta": ...}, r"config.json: rope_theta is None"),
    ("a strange rope base", {"rope_theta": "x"}, r"config.json: rope_theta is 'x'"),
    ("no norm epsilon", {"rms_norm_eps": ...}, r"config.json: rms_norm_eps is None"),
    (
        "heads do not share evenly",
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        r"num_attention_heads \(3\) is not a multiple of num_key_value_heads \(2\)",
    ),
    ("sliding windows", {"use_sliding_window": True}, r"use_sliding_window is true; quire"),
    (
        "another packing",
        {"quantization_config": {"quant_method": "awq"}},
        r"quantization_config.quant_method is 'awq'",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"), [pytest.param(edit, message, id=name) for name, edit, message in BROKEN]
)
def test_fault_16_a_broken_config_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = written(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig(folder).dimensions()
    assert "\n" not in str(caught.value)


def test_the_dimensions_are_read_and_the_tensors_follow_from_them(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    assert config.dimensions()["kv_heads"] == TINY.num_key_value_heads
    shapes = dict(expected_shapes(config, with_head=True))
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 128)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 64)
    assert set(shapes) - set(dict(expected_shapes(config, with_head=False))) == {"lm_head.weight"}
    bare = dict(expected_shapes(config, "", with_head=False))
    assert bare["embed_tokens.weight"] == (1024, 64)


def test_a_base_may_stand_among_the_ropes_parameters(tmp_path: Path) -> None:
    nested = {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert ModelConfig(written(tmp_path, nested)).has_plain_rope


@pytest.mark.parametrize(
    ("scaling", "plain"),
    [
        (None, True),
        ({"type": "linear", "factor": 2.0}, True),
        ({"rope_type": "default"}, True),
        ({"rope_type": "llama3", "factor": 2.0}, False),
        ({"type": "yarn", "factor": 2.0}, False),
    ],
)
def test_a_rope_is_plain_where_angles_grow_with_positions_alone(
    tmp_path: Path, scaling: dict[str, Any] | None, *, plain: bool
) -> None:
    config = ModelConfig(write_config(tmp_path, TINY, rope_scaling=scaling))
    assert config.has_plain_rope == plain


def test_a_rope_that_is_no_object_is_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY, rope_scaling="yarn"))
    with pytest.raises(CheckpointError, match=r"config\.json: rope_scaling is no object"):
        assert config.has_plain_rope


def test_how_a_layer_is_packed_is_said_once_or_for_it_alone(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    assert config.quantization("model.norm") is None
    packed = {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}}
    config = ModelConfig(write_config(tmp_path, TINY, quantization=packed))
    assert config.quantization("model.embed_tokens") == Quantization(4, 64)
    assert config.quantization("lm_head") == Quantization(8, 32)
