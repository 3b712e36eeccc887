"""Scaled positions turn heads as mlx-lm's do; a scaling that is not known is refused by name."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.rope import ORIGINAL, read_rope
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Rope
from tests.families import EXPERTS, HYBRID, QWEN3_NEXT
from tests.models import TINY, write_config
from tests.reference import classes_of, initialize_rope

HEAD_DIM = 32
BASE = 500_000.0
LONG = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 16}
SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "mscale_all_dim": 0.5},
    {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 6},
    {"rope_type": "longrope", "long_factor": [1.0 + i for i in range(16)], **LONG},
    {"rope_type": "longrope", "long_factor": [2.0] * 16, **LONG, "max": 64},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    {"rope_type": "mrope", "mrope_section": [4, 4, 8]},
]


def rope_of(folder: Path, scaling: Any, **changes: Any) -> Rope:
    fields = {"rope_theta": BASE, "rope_scaling": scaling} | changes
    return read_rope(ModelConfig(write_config(folder, TINY, **fields)), HEAD_DIM)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_heads_turn_as_mlx_lms_do(tmp_path: Path, scaling: dict[str, Any]) -> None:
    longest = scaling.get("max", 4096)
    rope = rope_of(tmp_path, scaling, max_position_embeddings=longest)
    theirs = initialize_rope(HEAD_DIM, BASE, False, scaling, longest)
    heads = mx.random.normal((1, 1, 1, HEAD_DIM))
    frequencies = np.array(rope.frequencies(HEAD_DIM))
    for position in (0, 1, 77, 3000):
        want = np.array(theirs(heads, offset=position))[0, 0, 0]
        low, high = np.split(np.array(heads)[0, 0, 0].astype(np.float64), 2)
        cosines, sines = np.cos(position * frequencies), np.sin(position * frequencies)
        got = np.concatenate([low * cosines - high * sines, low * sines + high * cosines])
        # An angle of mlx-lm's has the 24 bits of float32.
        np.testing.assert_allclose(got * rope.magnitude, want, atol=1e-5 + position * 1e-6)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_rope_is_plain_where_angles_grow_with_positions_alone(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    plain = rope_of(tmp_path, scaling).periods is None
    assert plain == (kind in ("default", "linear", "mrope"))


NEWER = {"rope_type": "default", "rope_theta": 1e7}
BOTH = {"rope_theta": 1e4, "rope_parameters": NEWER}
HALF = {"rope_theta": 1e4, "rope_parameters": NEWER | {"partial_rotary_factor": 0.5}}
LINEAR = {"rope_theta": ..., "rope_parameters": NEWER | {"type": "linear", "factor": 2}}


@pytest.mark.parametrize(
    ("fields", "outer"),
    [
        (HYBRID | BOTH, None),
        (HYBRID | HALF, None),
        (HYBRID | BOTH, {}),
        (HYBRID | {"rope_parameters": NEWER}, {"rope_theta": 1e4}),
        (HYBRID | EXPERTS | {"model_type": "qwen3_5_moe"} | BOTH, None),
        (QWEN3_NEXT | {"num_hidden_layers": 3} | HALF, None),
        ({"model_type": "qwen3"} | BOTH, None),
        ({"model_type": "qwen3"} | LINEAR, None),
        ({"model_type": "qwen2"} | BOTH, None),
        ({"model_type": "llama"} | BOTH, None),
    ],
    ids=str,
)
def test_of_two_bases_the_one_holds_that_mlx_lm_takes(
    tmp_path: Path, fields: dict[str, Any], outer: dict[str, Any] | None
) -> None:
    """outer: what stands around text_config; None: nothing does."""
    config = ModelConfig(write_config(tmp_path, TINY, **fields))
    if outer is not None:
        config.values = {"model_type": fields["model_type"], "text_config": config.values} | outer
    ours = read_spec(config).attentions[0].rope
    model, arguments = classes_of(config.values)
    theirs = model(arguments.from_dict(config.values)).layers[-1].self_attn.rope
    assert (ours.base, ours.scale) == (theirs.base, theirs.scale)
    assert (ours.dims or TINY.head_dim) == theirs.dims


NO_ANGLE = r"config\.json: with the numbers of rope_scaling no angle can be computed"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"rope_scaling": YARN, "max_position_embeddings": 2560}, 8192),
        ({"rope_scaling": YARN | {"type": "yarn", "factor": 2}}, 4096),
        ({"rope_scaling": YARN | {"factor": 1.5}}, 3072),
        ({"rope_scaling": YARN | {"rope_type": "deepseek_yarn"}}, 8192),
        ({"rope_parameters": YARN | {"rope_theta": 1e4}}, 8192),
        ({"rope_scaling": YARN, "max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": YARN, "max_position_embeddings": 10_000}, 10_000),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": YARN | {"rope_type": "llama3"}}, 2048),
        ({}, 2048),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "family", [{"model_type": "qwen3"}, {"model_type": "llama"}, HYBRID], ids=str
)
def test_yarns_context_is_the_trained_one_times_the_factor(
    tmp_path: Path, family: dict[str, Any], fields: dict[str, Any], context: int
) -> None:
    changes = {"max_position_embeddings": 2048} | family | fields
    spec = read_spec(ModelConfig(write_config(tmp_path, TINY, **changes)))
    assert spec.max_position_embeddings == context


def test_what_does_not_turn_has_no_frequency() -> None:
    assert Rope(1e4, periods=(2.0, math.inf)).frequencies(4) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", r"config\.json: rope_scaling is no object"),
        ({"type": "spiral"}, r"config\.json: rope_scaling\.type is 'spiral', which quire does not"),
        ({"type": "linear"}, r"config\.json: rope_scaling\.factor is None; it must be a number"),
        ({"type": "yarn", "factor": "4"}, r"config\.json: rope_scaling\.factor is '4'"),
        (
            {"type": "longrope", "long_factor": [1.0], **LONG},
            r"config\.json: rope_scaling\.long_factor must be 16 numbers",
        ),
        (YARN | {"factor": math.nan}, r"rope_scaling\.factor is nan; it must be a number above 0"),
        (YARN | {"factor": math.inf}, r"rope_scaling\.factor is inf; it must be a number above 0"),
        (YARN | {"factor": 10**400}, r"rope_scaling\.factor is 10+; it must be a number above 0"),
        (YARN | {"beta_slow": 1e-320}, NO_ANGLE),
        (YARN | {"mscale_all_dim": "1"}, NO_ANGLE),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}, NO_ANGLE),
        ({"type": "longrope", "long_factor": [1.0] * 16, ORIGINAL: 0.5}, NO_ANGLE),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, scaling: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(tmp_path, scaling)
