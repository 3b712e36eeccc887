"""Tensors follow from a spec, and sizes of packed ones are told before they are loaded."""

from pathlib import Path
from typing import Any

import pytest

import metal_ext
from engine.models.checkpoint import read_checkpoint
from engine.models.config import ModelConfig
from engine.models.cpu_ops import CpuOps
from engine.models.families import read_spec
from engine.models.families.qwen3 import dense_decoder
from engine.models.tensors import Naming, model_tensors
from engine.models.weights import read_weights
from tests.engine.models.hybrids import MIXED, QWEN3_5_MOE, QWEN3_NEXT, write_hybrid
from tests.models import TINY, ModelSpec, write_config, write_model

WORKERS = metal_ext.CpuWorkers(1)
SMALL = ModelSpec(1, hidden_size=128, num_attention_heads=4, intermediate_size=256, vocab_size=512)
# No dimension but those that panels need divides anything.
ODD = ModelSpec(
    num_hidden_layers=1,
    hidden_size=70,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=112,
    vocab_size=1001,
    tie_word_embeddings=False,
)


def test_the_tensors_follow_from_the_spec(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, TINY)))
    shapes = model_tensors(spec, with_head=True).shapes
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 128)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 64)
    headless = model_tensors(spec, with_head=False).shapes
    assert shapes.keys() - headless.keys() == {"lm_head.weight"}
    bare = model_tensors(spec, Naming(""), with_head=False).shapes
    assert bare["embed_tokens.weight"] == (1024, 64)


def test_biases_and_norms_are_there_where_the_spec_has_them(tmp_path: Path) -> None:
    config = ModelConfig(write_config(tmp_path, TINY))
    other = dense_decoder(config, "Qwen2", TINY.head_dim, qk_norm=False, qkv_bias=True)
    shapes, qwen3 = (model_tensors(s, with_head=False).shapes for s in (other, read_spec(config)))
    layers = [f"model.layers.{number}.self_attn" for number in range(2)]
    biases = {f"{layer}.{part}_proj.bias" for layer in layers for part in "qkv"}
    assert shapes.keys() - qwen3.keys() == biases
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (32,)
    norms = {f"{layer}.{part}_norm.weight" for layer in layers for part in "qk"}
    assert qwen3.keys() - shapes.keys() == norms


def packed_size(folder: Path) -> int:
    """What is really there after packing."""
    sizes: list[int] = []
    found = read_checkpoint(folder)
    stored = read_weights(found)
    CpuOps(found.spec, found.tensors, stored, WORKERS, sizes.append)
    vectors = [shape for shape in found.tensors.shapes.values() if len(shape) == 1]
    return sum(sizes) + 4 * sum(size for (size,) in vectors)


@pytest.mark.parametrize(
    "how",
    [QWEN3_5_MOE, QWEN3_5_MOE | MIXED, QWEN3_NEXT | {"hub": True}, QWEN3_NEXT | MIXED],
    ids=["MoE", "MoE, mixed", "Next on the hub", "Next, mixed"],
)
def test_the_size_of_a_hybrid_is_what_packing_makes(tmp_path: Path, how: dict[str, Any]) -> None:
    checkpoint = read_checkpoint(write_hybrid(tmp_path, dtype="bfloat16", **how))
    sizes: list[int] = []
    CpuOps(checkpoint.spec, checkpoint.tensors, read_weights(checkpoint), WORKERS, sizes.append)
    assert checkpoint.packed_bytes == sum(sizes) + 4 * checkpoint.tensors.count(1)


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (SMALL, {"dtype": "float32"}),
        (SMALL, {"dtype": "bfloat16"}),
        (SMALL, {"dtype": "float16"}),
        (SMALL, {"dtype": "float32", "bits": 4, "group_size": 64}),
        (SMALL, {"dtype": "bfloat16", "bits": 4}),
        (SMALL, {"dtype": "bfloat16", "bits": 8, "group_size": 128}),
        (SMALL, {"dtype": "float16", "bits": 8, "group_size": 64}),
        (SMALL, {"dtype": "bfloat16", "bits": 3}),
        (SMALL, {"dtype": "float32", "bits": 5, "group_size": 64}),
        (SMALL, {"dtype": "bfloat16", "bits": 4, "mode": "mxfp4"}),
        (SMALL, {"dtype": "bfloat16", "bits": 4, "group_size": 16, "mode": "nvfp4"}),
        (SMALL, {"dtype": "bfloat16", "bits": 8, "mode": "mxfp8"}),
        (
            SMALL,
            {"dtype": "bfloat16", "bits": 4, "layers": {"v_proj": {"bits": 6, "group_size": 64}}},
        ),
        (SMALL, {"dtype": "bfloat16", "bits": 4, "layers": {"k_proj": False, "up_proj": False}}),
        (ModelSpec(num_hidden_layers=1, tie_word_embeddings=False), {"bits": 4}),
        (ModelSpec(intermediate_size=100), {"dtype": "bfloat16"}),
        (SMALL, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (ODD, {"dtype": "float32"}),
        (ODD, {"dtype": "bfloat16"}),
    ],
)
def test_the_size_is_what_packing_makes(
    tmp_path: Path, spec: ModelSpec, how: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, spec, **how)
    assert read_checkpoint(folder).packed_bytes == packed_size(folder)
