"""Tensors follow from a spec, and sizes of packed ones are told before they are loaded."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.models.checkpoint import read_checkpoint
from engine.models.config import ModelConfig
from engine.models.cpu_ops import CpuOps, pack_linear
from engine.models.dense import dense_decoder
from engine.models.families import read_spec
from engine.models.stored import StoredMatrix
from engine.models.tensors import GROUP_SIZES, INPUT_STEP, PANEL_OUTPUTS, model_tensors
from engine.models.weights import Arithmetic, read_weights
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
K_PROJ = "model.layers.0.self_attn.k_proj"


def test_the_tensors_follow_from_the_spec(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, TINY)))
    shapes = model_tensors(spec, with_head=True).shapes
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 128)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 64)
    headless = model_tensors(spec, with_head=False).shapes
    assert shapes.keys() - headless.keys() == {"lm_head.weight"}
    bare = model_tensors(spec, "", with_head=False).shapes
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
    stored = read_weights(found, Arithmetic.PACKED)
    CpuOps(found.spec, found.tensors, stored, WORKERS, sizes.append)
    vectors = [shape for shape in found.tensors.shapes.values() if len(shape) == 1]
    return sum(sizes) + 4 * sum(size for (size,) in vectors)


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
        (ModelSpec(num_hidden_layers=1, tie_word_embeddings=False), {"bits": 4}),
        (ODD, {"dtype": "float32"}),
        (ODD, {"dtype": "bfloat16"}),
    ],
)
def test_the_size_is_what_packing_makes(
    tmp_path: Path, spec: ModelSpec, how: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, spec, **how)
    assert read_checkpoint(folder).packed_bytes == packed_size(folder)


def test_the_figures_are_the_kernels_own() -> None:
    def size(outputs: int, inputs: int) -> int:
        return pack_linear([StoredMatrix(mx.zeros((outputs, inputs)))], WORKERS).nbytes

    assert size(1, 1) == PANEL_OUTPUTS * INPUT_STEP * 4
    assert size(PANEL_OUTPUTS, INPUT_STEP) == size(1, 1) < size(PANEL_OUTPUTS + 1, 1)
    assert size(1, INPUT_STEP + 1) == 2 * size(1, 1)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_groups_that_the_kernels_do_not_know_cannot_be_packed(tmp_path: Path, group: int) -> None:
    """Of a folder as MLX could have written it: MLX itself knows 32, 64 and 128."""
    folder = write_model(tmp_path, ModelSpec(1, 256, 2, 1, 128, 256), bits=4, group_size=32)
    regrouped(folder, group)
    found = read_checkpoint(folder)
    assert (found.packed_bytes is not None) == (group in GROUP_SIZES)


def regrouped(folder: Path, group: int) -> None:
    """Writes scales and biases for groups of another size; nobody multiplies with them."""
    file = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    for name, array in weights.items():
        if name.endswith((".scales", ".biases")):
            rows, groups = array.shape
            weights[name] = mx.zeros((rows, groups * 32 // group), array.dtype)
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    change_config(folder, quantization={"bits": 4, "group_size": group})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weight(folder: Path, layer: str, **tensors: mx.array) -> None:
    """Puts other tensors in the place of a layer's."""
    file = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    kept = {name: array for name, array in weights.items() if not name.startswith(f"{layer}.")}
    kept |= {f"{layer}.{name}": array for name, array in tensors.items()}
    mx.eval(kept)
    mx.save_safetensors(file, kept, {"format": "mlx"})


def test_queries_keys_and_values_of_different_numbers_cannot_be_packed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype="bfloat16")
    assert read_checkpoint(folder).packed_bytes is not None
    change_weight(folder, K_PROJ, weight=mx.zeros((32, 64), mx.float32))
    assert read_checkpoint(folder).packed_bytes is None


def test_keys_that_are_not_grouped_beside_queries_that_are_cannot_be_packed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, bits=4)
    assert read_checkpoint(folder).packed_bytes is not None
    change_weight(folder, K_PROJ, weight=mx.zeros((32, 64), mx.float32))
    assert read_checkpoint(folder).packed_bytes is None


def test_a_layer_that_is_joined_with_none_may_be_grouped_in_its_own_way(tmp_path: Path) -> None:
    folder = write_model(tmp_path, bits=4)
    name = "model.layers.0.mlp.down_proj"
    weight, scales, biases = mx.quantize(mx.random.normal((64, 128)), 64, 8)
    change_weight(folder, name, weight=weight, scales=scales, biases=biases)
    own = {name: {"bits": 8, "group_size": 64}}
    change_config(folder, quantization={"bits": 4, "group_size": 32} | own)
    assert read_checkpoint(folder).packed_bytes == packed_size(folder)


def test_gates_that_do_not_fill_their_last_panel_cannot_be_packed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, ModelSpec(intermediate_size=100))
    found = read_checkpoint(folder)
    assert found.packed_bytes is None
    joined = [product for product in found.tensors.products if len(product) > 1]
    layers = {product[0].name.partition(".0.")[2] for product in joined[:2]}
    assert layers == {"self_attn.q_proj", "mlp.gate_proj"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e6}},
    ],
)
def test_a_rope_of_any_kind_can_be_packed(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_model(tmp_path)
    change_config(folder, **changes)
    assert read_checkpoint(folder).packed_bytes == packed_size(folder)
