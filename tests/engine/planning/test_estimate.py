"""What fits and how fast it is: the figures that `quire plan` begins with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.models.checkpoint import promised_checkpoint
from engine.planning.devices import CPU, Device, find_device
from engine.planning.estimate import Estimate, estimate, in_four_bits, plan_elsewhere
from engine.planning.memory import BF16, read_shape, weights_bytes
from kvcache.memory_budget import BudgetError
from tests.engine.planning.test_capacity import SERVER as AT_4096
from tests.families import PUBLISHED
from tests.models import QWEN3_4B, write_config

GIB = 1024**3
FOUR_BITS = {"group_size": 64, "bits": 4}
EIGHT_BIT_EMBEDDING = {"model.embed_tokens": {"group_size": 64, "bits": 8}}
SERVER = replace(AT_4096, kv_budget_bytes=None, max_model_len=None)


def mac(name: str = "M4 Pro") -> Device:
    device = find_device(name)
    assert device is not None
    return device


def estimated(folder: Path, device: Device, config: EngineConfig = SERVER) -> Estimate:
    plan = plan_elsewhere(config, promised_checkpoint(folder), device, 64 * GIB)
    return estimate(plan, device, config)


@pytest.mark.parametrize(
    ("model", "changes", "gigabytes"),
    [
        ("Qwen3-4B", {}, 8.04),
        ("Qwen3-4B", {"quantization": FOUR_BITS}, 2.26),
        ("Qwen3-30B-A3B", {"quantization": FOUR_BITS}, 17.2),
        ("Qwen3-30B-A3B", {"quantization": FOUR_BITS | EIGHT_BIT_EMBEDDING}, 17.3),
        ("Qwen3.6-27B", {"quantization": FOUR_BITS}, 15.1),
        ("Qwen3.6-35B-A3B", {"quantization": FOUR_BITS}, 19.5),
        ("Qwen3-4B", {"dtype": "float32"}, 16.1),
    ],
)
def test_a_step_reads_the_bytes_that_the_plan_has(
    tmp_path: Path, model: str, changes: dict[str, Any], gigabytes: float
) -> None:
    if model == "Qwen3-4B":
        write_config(tmp_path, QWEN3_4B, **changes)
    else:
        PUBLISHED[model].write(tmp_path, **changes)
    planned = estimated(tmp_path, mac())
    memory, shape = planned.plan.memory, read_shape(tmp_path)
    assert memory.demand.weights_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    read = planned.cost.bytes_per_number * shape.matrix_numbers
    assert read == pytest.approx(memory.demand.weights_bytes, rel=1e-3)
    assert planned.cost.kv == memory.layout.shape
    assert planned.decode_tokens_per_s(1024) == 1 / planned.cost.step_seconds([(1023, 1)])


@pytest.mark.parametrize("prompt", [1, 100, 4100])
def test_a_prompt_takes_as_long_as_its_steps(tmp_path: Path, prompt: int) -> None:
    """Each has as many tokens as half a second allows: five times the target."""
    model = estimated(write_config(tmp_path, QWEN3_4B), mac())
    steps, start = [], 0
    while start < prompt:
        count = min(model.cost.prompt_tokens(0.5, 2048, start), prompt - start)
        steps.append(model.cost.step_seconds([(start, count)]))
        start += count
    assert max(steps) <= 0.5
    assert model.first_token_s(prompt) == pytest.approx(sum(steps))
    assert (len(steps) > 1) == (prompt > 1000)


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
    checkpoint = promised_checkpoint(folder)
    usual = plan_elsewhere(SERVER, checkpoint, mac(), 24 * GIB).memory
    assert usual.demand.machine_bytes == 16 * GIB
    told = plan_elsewhere(SERVER, checkpoint, mac(), 24 * GIB, 20 * GIB).memory
    assert told.demand.machine_bytes == 20 * GIB
    with pytest.raises(BudgetError, match="the weights alone take"):
        plan_elsewhere(SERVER, checkpoint, mac(), 8 * GIB)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_same_model_in_four_bits(tmp_path: Path, on_gpu: bool) -> None:
    folder = write_config(tmp_path, QWEN3_4B)
    shape, checkpoint = read_shape(folder), promised_checkpoint(folder)
    assert checkpoint.stored_bytes == weights_bytes(shape, BF16)
    packed = in_four_bits(shape, checkpoint, on_gpu=on_gpu)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": FOUR_BITS}
    (folder / "config.json").write_text(json.dumps(config))
    stored = promised_checkpoint(folder)
    size = stored.stored_bytes if on_gpu else stored.packed_bytes
    assert packed.stored_bytes == packed.packed_bytes == pytest.approx(size, rel=0.01)
