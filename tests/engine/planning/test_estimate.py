"""What fits and how fast it is: the figures that `quire plan` begins with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.planning.devices import CPU, CostModel, Device, find_device
from engine.planning.estimate import (
    Estimate,
    checkpoint_without_weights,
    estimate,
    in_four_bits,
    plan_elsewhere,
)
from engine.planning.memory import BF16, Packing, read_shape, weights_bytes
from kvcache.memory_budget import BudgetError
from tests.engine.planning.test_capacity import SERVER as AT_4096
from tests.families import PUBLISHED
from tests.models import QWEN3_4B, write_config

GIB = 1024**3
FOUR_BITS = {"group_size": 64, "bits": 4}
SERVER = replace(AT_4096, kv_budget_bytes=None, max_model_len=None)


def mac(name: str = "M4 Pro") -> Device:
    device = find_device(name)
    assert device is not None
    return device


def estimated(folder: Path, device: Device, memory_gib: int = 64) -> Estimate:
    shape = read_shape(folder)
    checkpoint = checkpoint_without_weights(folder, shape)
    plan = plan_elsewhere(SERVER, checkpoint, device, memory_gib * GIB)
    return estimate(shape, plan, device, SERVER)


@pytest.mark.parametrize(
    ("model", "changes", "read_bytes", "kv_bytes", "state_bytes"),
    [
        ("Qwen3-4B", {}, 8.04e9, 147456, 0),
        ("Qwen3-4B", {"quantization": FOUR_BITS}, 2.26e9, 147456, 0),
        ("Qwen3-30B-A3B", {"quantization": FOUR_BITS}, 1.72e9, 98304, 0),
        ("Qwen3.6-27B", {"quantization": FOUR_BITS}, 14.5e9, 65536, 153.9e6),
        ("Qwen3.6-35B-A3B", {"quantization": FOUR_BITS}, 1.67e9, 20480, 64.4e6),
        ("Qwen3-4B", {"dtype": "float32"}, 16.1e9, 147456, 0),
    ],
)
@pytest.mark.parametrize("context", [1024, 32768])
def test_a_chat_is_as_fast_as_what_its_steps_read(
    tmp_path: Path,
    model: str,
    changes: dict[str, Any],
    read_bytes: float,
    kv_bytes: int,
    state_bytes: float,
    context: int,
) -> None:
    """Of mixtures only the experts that one token chooses, of hybrids the states twice."""
    if model == "Qwen3-4B":
        write_config(tmp_path, QWEN3_4B, **changes)
    else:
        PUBLISHED[model].write(tmp_path, **changes)
    moved = read_bytes + kv_bytes * (context + 1) + 2 * state_bytes
    per_s = estimated(tmp_path, mac()).decode_tokens_per_s(context)
    assert per_s == pytest.approx(1 / (mac().step_overhead_s + moved / 273e9), rel=0.02)


def test_a_prompt_takes_as_long_as_its_steps(tmp_path: Path) -> None:
    model = estimated(write_config(tmp_path, QWEN3_4B), mac())
    steps = [(0, 2048), (2048, 2048), (4096, 4)]
    assert model.first_token_s(4100) == sum(model.cost.step_seconds([step]) for step in steps)
    assert model.first_token_s(100) == model.cost.step_seconds([(0, 100)])


@pytest.mark.parametrize("device", [mac(), CPU])
@pytest.mark.parametrize("model", ["Qwen3.5-4B", "Qwen3-30B-A3B"])
def test_chats_are_as_many_as_places_and_memory_allow(
    tmp_path: Path, model: str, device: Device
) -> None:
    folder = PUBLISHED[model].write(tmp_path, quantization=FOUR_BITS)
    planned = estimated(folder, device)
    memory = planned.plan.memory
    assert planned.chats(16) == memory.max_num_seqs == 32
    longest = memory.max_model_len
    held = memory.kv_budget_bytes // memory.layout.bytes_per_token
    assert planned.chats(longest) in (held // longest - 1, held // longest)


def test_what_the_gpu_may_use_is_believed(tmp_path: Path) -> None:
    folder = write_config(tmp_path, QWEN3_4B)
    checkpoint = checkpoint_without_weights(folder, read_shape(folder))
    usual = plan_elsewhere(SERVER, checkpoint, mac(), 24 * GIB).memory
    assert usual.demand.machine_bytes == 16 * GIB
    told = plan_elsewhere(SERVER, checkpoint, mac(), 24 * GIB, 20 * GIB).memory
    assert told.demand.machine_bytes == 20 * GIB
    with pytest.raises(BudgetError, match="the weights alone take"):
        plan_elsewhere(SERVER, checkpoint, mac(), 8 * GIB)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_same_model_in_four_bits(tmp_path: Path, on_gpu: bool) -> None:
    folder = write_config(tmp_path, QWEN3_4B)
    shape = read_shape(folder)
    checkpoint = checkpoint_without_weights(folder, shape)
    assert checkpoint.stored_bytes == weights_bytes(shape, BF16)
    packed_shape, packed = in_four_bits(shape, checkpoint, on_gpu=on_gpu)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": FOUR_BITS}
    (folder / "config.json").write_text(json.dumps(config))
    own = read_shape(folder)
    assert packed_shape == own
    stored = checkpoint_without_weights(folder, own)
    size = stored.stored_bytes if on_gpu else stored.packed_bytes
    assert packed.stored_bytes == packed.packed_bytes == pytest.approx(size, rel=0.01)


def test_the_cost_of_an_estimate_is_that_of_its_packing(tmp_path: Path) -> None:
    folder = write_config(tmp_path, QWEN3_4B, dtype="float32")
    shape = read_shape(folder)
    assert estimated(folder, CPU).cost == CostModel.of(shape, CPU, Packing("F32", 32))
