"""Experts by all the names that checkpoints have for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.checkpoint import promised_checkpoint, read_checkpoint
from engine.models.expert_tensors import ExpertNames, find_expert_names
from engine.models.safetensors_headers import CheckpointError
from engine.models.weights import load_model
from metal_ext import CpuWorkers
from tests.families import QWEN3_MOE, ROUTERS, names_apart, names_fused
from tests.models import TINY, write_model


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        ("model.layers.0.mlp.switch_mlp.gate_proj.weight", ExpertNames.STACKED),
        ("model.layers.0.mlp.experts.7.gate_proj.weight", ExpertNames.APART),
        ("model.layers.0.mlp.experts.gate_up_proj", ExpertNames.FUSED),
        ("model.layers.0.mlp.experts.down_proj", ExpertNames.FUSED),
        ("model.layers.0.mlp.gate.weight", ExpertNames.STACKED),
    ],
)
def test_names_are_found_by_any_tensor_of_an_expert(tensor: str, names: ExpertNames) -> None:
    assert find_expert_names(["model.norm.weight", tensor]) is names


@pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
@pytest.mark.parametrize(
    ("rename", "names"),
    [(names_apart, ExpertNames.APART), (names_fused, ExpertNames.FUSED)],
)
def test_a_model_is_the_same_by_any_names(
    tmp_path: Path, rename: Callable[[Path], Path], names: ExpertNames, packed: bool
) -> None:
    stacked = read_checkpoint(write_model(tmp_path / "stacked", **QWEN3_MOE))
    other = read_checkpoint(rename(write_model(tmp_path / "other", **QWEN3_MOE)))
    assert (stacked.naming.experts, other.naming.experts) == (ExpertNames.STACKED, names)
    assert other.num_weights == stacked.num_weights
    assert other.packed_bytes == stacked.packed_bytes
    workers = CpuWorkers(1) if packed else None
    x, made = mx.random.normal((5, TINY.hidden_size), key=mx.random.key(1)), []
    for checkpoint in (stacked, other):
        model = load_model(checkpoint, lambda *_: None, workers)
        made.append(np.array(model.ops.add_mlp(1, x)))
    np.testing.assert_allclose(made[0], made[1], rtol=1e-6)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = names_apart(write_model(tmp_path, **QWEN3_MOE))
    file, lost = str(folder / "model.safetensors"), "model.layers.1.mlp.experts.7.up_proj.weight"
    stored: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    kept = {name: array for name, array in stored.items() if name != lost}
    mx.eval(kept)
    mx.save_safetensors(file, kept)
    with pytest.raises(CheckpointError, match=f"no file holds the tensor {lost}"):
        read_checkpoint(folder)


def test_experts_that_were_packed_one_by_one_are_refused(tmp_path: Path) -> None:
    folder = names_apart(write_model(tmp_path, bits=4, **QWEN3_MOE))
    with pytest.raises(CheckpointError, match=r"experts\.\d\.\w+\.scales is of one expert; quire"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "how",
    [{"dtype": "bfloat16"}, {"bits": 4, "group_size": 64, "layers": ROUTERS}, {"bits": 3}],
    ids=str,
)
def test_what_is_promised_of_experts_is_what_comes(tmp_path: Path, how: dict[str, Any]) -> None:
    whole = read_checkpoint(write_model(tmp_path, **how, **QWEN3_MOE))
    sizes: list[int] = []
    load_model(whole, lambda done, _: sizes.append(done), CpuWorkers(1))
    assert sizes[-2] == whole.packed_bytes - 4 * whole.tensors.count(1)
    (whole.path / "model.safetensors").unlink()
    assert promised_checkpoint(whole.path, whole.stored_bytes) == whole
