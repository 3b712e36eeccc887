"""Gemmas are read as MLX's tools and as the hub write them, and their logits are mlx-lm's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from tests.engine.models.forwards import ours, prompt, spread
from tests.engine.models.hybrids import (
    Steps,
    assert_chunks_change_no_bit,
    logits_in_chunks_and_company,
    write_hybrid,
)
from tests.families import GEMMA2, GEMMA3
from tests.models import SMALL, write_config
from tests.reference import clip_residual, load_reference, logits_of

SPEC = replace(SMALL, num_hidden_layers=5, head_dim=64)
WINDOW = 40
TOLERANCE = 1e-4
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
EACH = pytest.mark.parametrize("fields", [GEMMA2, GEMMA3], ids=["Gemma 2", "Gemma 3"])


def written(folder: Path, fields: dict[str, Any], **how: Any) -> Checkpoint:
    return read_checkpoint(write_hybrid(folder, SPEC, **({"dtype": "float32"} | fields | how)))


@BOTH
@EACH
@pytest.mark.parametrize("how", [{}, {"bits": 4}], ids=str)
def test_logits_equal_mlx_lms_by_chunks_and_in_company(
    tmp_path: Path, fields: dict[str, Any], how: dict[str, Any], packed: bool
) -> None:
    checkpoint = written(tmp_path, fields, **how)
    model, ids, other = ours(checkpoint, packed=packed), prompt(200), prompt(30, 1)
    logits, beside = logits_in_chunks_and_company(checkpoint, model, ids, other)
    assert spread(logits, logits_of(checkpoint, ids)) < TOLERANCE
    assert spread(beside, logits_of(checkpoint, other)) < TOLERANCE


@EACH
def test_norms_of_16_bits_get_their_one_in_32(tmp_path: Path, fields: dict[str, Any]) -> None:
    checkpoint, ids = written(tmp_path, fields, dtype="bfloat16"), prompt(60)
    logits = Steps(checkpoint, ours(checkpoint), {1: 60}).run([(1, 0, ids)], list(range(60)))
    assert logits is not None
    assert spread(logits, logits_of(checkpoint, ids)) < TOLERANCE


def test_residuals_beyond_float16_are_its_largest_number_as_in_mlx_lm(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, GEMMA3, dtype="float16")
    signs = mx.random.bernoulli(0.5, (20, SPEC.hidden_size), key=mx.random.key(0))
    x = mx.where(signs, 65480.0, -65480.0).astype(mx.float16)
    got = ours(checkpoint, packed=False).ops.add_mlp(0, x)
    layer = load_reference(checkpoint, stored=True).layers[0]
    made = layer.mlp(layer.pre_feedforward_layernorm(x))
    want = clip_residual(x, layer.post_feedforward_layernorm(made))
    assert got.dtype == mx.float16
    assert mx.abs(got).max() == 65504
    assert mx.array_equal(got, want)


@EACH
def test_what_is_computed_does_not_depend_on_chunks_bit_by_bit(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    checkpoint = written(tmp_path, fields)
    assert_chunks_change_no_bit(checkpoint, ours(checkpoint))


def test_layers_have_the_windows_and_the_rope_of_their_kind(tmp_path: Path) -> None:
    second = read_spec(ModelConfig(write_config(tmp_path / "2", SPEC, **GEMMA2)))
    assert [its.window for its in second.attentions] == [WINDOW, None] * 2 + [WINDOW]
    third = read_spec(ModelConfig(write_config(tmp_path / "3", SPEC, **GEMMA3)))
    assert [its.window for its in third.attentions] == [WINDOW, WINDOW, None, WINDOW, WINDOW]
    bases = [(its.rope.base, its.rope.scale) for its in third.attentions]
    assert bases == [(1e4, 1.0), (1e4, 1.0), (1e6, 1 / 8), (1e4, 1.0), (1e4, 1.0)]
    kinds = ["full_attention" if i == 2 else "sliding_attention" for i in range(5)]
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    newer = {"layer_types": kinds, "rope_parameters": nested, "rope_scaling": ...}
    newer |= dict.fromkeys(("rope_theta", "rope_local_base_freq", "sliding_window_pattern"), ...)
    folder = write_config(tmp_path / "5", SPEC, **(GEMMA3 | newer))
    assert read_spec(ModelConfig(folder)) == third


def test_the_text_of_a_gemma_3_with_images_is_the_same_model(tmp_path: Path) -> None:
    plain = written(tmp_path / "text", GEMMA3)
    whole = written(tmp_path / "images", GEMMA3, hub=True)
    assert whole.spec == plain.spec
    assert whole.left_out == (
        "Gemma 3 is served without what its files have for images (2 tensors)"
    )
    ids = prompt(60)
    one, other = (
        Steps(each, ours(each), {1: 60}).run([(1, 0, ids)], [59]) for each in (plain, whole)
    )
    assert one is not None
    assert other is not None
    assert mx.array_equal(one, other)


def test_what_files_of_gemma_3_leave_out_is_as_in_the_smallest(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    values |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    nested = {"model_type": "gemma3", "text_config": values | {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    spec = read_spec(ModelConfig(tmp_path))
    (its,) = {replace(each, window=None, rope=spec.attentions[0].rope) for each in spec.attentions}
    assert (its.heads, its.kv_heads, its.head_dim, its.scale) == (8, 4, 256, 1 / 16)
    assert [each.window for each in spec.attentions].count(1024) == 29
    assert (spec.vocab_size, spec.max_position_embeddings) == (262208, 131072)
    assert spec.embedding_scale == 50.5  # 50.596 in bfloat16
    assert spec.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; it must be gelu_pytorch_tanh",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true; quire"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; it must be a number above"),
        ({"layer_types": ["full_attention"]}, "layer_types must be sliding_attention or full"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types must be sliding_attention or"),
        (
            {"layer_types": 3},
            "layer_types must be sliding_attention or full_attention, of 5 layers",
        ),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of"),
        ({"model_type": "gemma3n"}, "'gemma3n', which is not served: its layers have embeddings"),
        ({"model_type": "phi3"}, "'phi3', which is not served: its matrices are stored joined"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_config(tmp_path, SPEC, **(GEMMA3 | changes))
    with pytest.raises(CheckpointError, match=message):
        read_spec(ModelConfig(folder))
