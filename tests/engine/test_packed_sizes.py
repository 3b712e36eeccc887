"""What is told of packed weights before they are loaded is what they take."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import metal_ext
from engine.checkpoint import read_checkpoint
from engine.packed_sizes import GROUP_SIZES, INPUT_STEP, JOINED, PANEL_OUTPUTS
from engine.packed_weights import pack_linear, pack_qwen3
from engine.weights import lazy_reference
from tests.models import ModelSpec, write_model

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


def packed_size(folder: Path) -> int:
    """What is really there after packing."""
    sizes: list[int] = []
    model = lazy_reference(read_checkpoint(folder))
    numbers: list[int] = [a.size for _, a in tree_flatten(model.parameters()) if a.ndim == 1]
    pack_qwen3(model, WORKERS, sizes.append)
    return sum(sizes) + 4 * sum(numbers)


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
        return pack_linear([Plain(mx.zeros((outputs, inputs)))], WORKERS).nbytes

    assert size(1, 1) == PANEL_OUTPUTS * INPUT_STEP * 4
    assert size(PANEL_OUTPUTS, INPUT_STEP) == size(1, 1) < size(PANEL_OUTPUTS + 1, 1)
    assert size(1, INPUT_STEP + 1) == 2 * size(1, 1)


class Plain:
    """A layer of such weights."""

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight


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
    assert read_checkpoint(folder).packed_bytes is None
    assert {names[0] for names in JOINED} == {"self_attn.q_proj", "mlp.gate_proj"}


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, True),
        ({"rope_scaling": {"rope_type": "default"}}, True),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_theta": 1e6}}, True),
    ],
)
def test_a_rope_of_another_kind_cannot_be_packed(
    tmp_path: Path, changes: dict[str, Any], *, plain: bool
) -> None:
    folder = write_model(tmp_path)
    change_config(folder, **changes)
    assert (read_checkpoint(folder).packed_bytes is not None) == plain
    if plain:
        assert read_checkpoint(folder).packed_bytes == packed_size(folder)
