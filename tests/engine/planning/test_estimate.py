"""What fits and how fast it is: the figures that `quire plan` begins with."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.models.checkpoint import promised_checkpoint
from engine.planning.devices import CPU, Device
from engine.planning.estimate import Estimate, estimate, in_four_bits, plan_elsewhere
from engine.planning.memory import (
    BF16,
    activation_bytes,
    attention_scratch_bytes,
    read_shape,
    weights_bytes,
)
from kvcache.backends.choice import KVBackend
from kvcache.budget import BudgetError
from tests.engine.planning.test_capacity import FOUR_BITS, GIB, MODELS, chip
from tests.engine.planning.test_capacity import SERVER as AT_4096
from tests.models import QWEN3_4B, write_config

EIGHT_BIT_EMBEDDING = {"model.embed_tokens": {"group_size": 64, "bits": 8}}
SERVER = replace(AT_4096, kv_budget_bytes=None, max_model_len=None)
MAC = chip("M4 Pro")


def estimated(folder: Path, device: Device = MAC) -> Estimate:
    plan = plan_elsewhere(SERVER, promised_checkpoint(folder), device.with_memory(64 * GIB))
    return estimate(plan, device, SERVER)


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
    planned = estimated(MODELS[model].write(tmp_path, **changes))
    memory, shape = planned.plan.memory, read_shape(tmp_path)
    assert memory.demand.weights_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    read = planned.cost.bytes_per_number * shape.matrix_numbers
    assert read == pytest.approx(memory.demand.weights_bytes, rel=1e-3)
    assert planned.cost.kv == memory.layout.shape
    assert planned.decode_tokens_per_s(1024) == 1 / planned.cost.step_seconds([(1023, 1)])


@pytest.mark.parametrize("memory_gib", [8, 16, 24, 36, 64])
def test_activations_are_planned_for_the_context_and_the_sequences_that_fit(
    tmp_path: Path, memory_gib: int
) -> None:
    fitting = 0
    for name in ("Qwen3-4B", "Qwen3-30B-A3B", "Qwen3.5-4B", "Qwen3.6-27B", "Bonsai-2-27B"):
        packing = {} if name.startswith("Bonsai") else {"quantization": FOUR_BITS}
        folder = MODELS[name].write(tmp_path / name, **packing)
        checkpoint = promised_checkpoint(folder)
        with suppress(BudgetError):
            plan = plan_elsewhere(SERVER, checkpoint, MAC.with_memory(memory_gib * GIB)).memory
            demand, limits = plan.demand, (plan.max_model_len, plan.max_num_seqs)
            taken = demand.fixed_bytes + plan.kv_budget_bytes + plan.state_bytes
            assert taken <= demand.usable_bytes
            config = replace(SERVER, max_model_len=limits[0], max_num_seqs=limits[1])
            least = activation_bytes(checkpoint.spec, config, 2) + attention_scratch_bytes(
                checkpoint.spec, config, plan.layout.shape, KVBackend.SPARSE
            )
            assert least <= demand.activation_bytes <= 1.05 * least, (name, limits)
            fitting += 1
    assert fitting


@pytest.mark.parametrize("device", ["M1 Max", "M2 Pro", "M3 Max", "M4", "M4 Pro", "M5"])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3.6-35B-A3B"])
def test_a_prompt_of_a_mixture_is_about_as_fast_as_in_one_step(
    tmp_path: Path, name: str, device: str
) -> None:
    """In steps of half a second, those of the slower chips would take up to three times as long."""
    model = estimated(MODELS[name].write(tmp_path, quantization=FOUR_BITS), chip(device))
    assert model.first_token_s(2048) < 1.35 * model.cost.step_seconds([(0, 2048)])


@pytest.mark.parametrize("limit", [1, 3, 7, 8, 40])
def test_a_prompt_is_planned_in_steps_of_any_number_of_tokens(tmp_path: Path, limit: int) -> None:
    model = estimated(MODELS["Qwen3-30B-A3B"].write(tmp_path, quantization=FOUR_BITS))
    few = replace(model, config=replace(SERVER, max_num_batched_tokens=limit))
    assert few.first_token_s(300) > model.first_token_s(300)


@pytest.mark.parametrize("prompt", [1, 100, 4100])
def test_a_prompt_takes_as_long_as_its_steps(tmp_path: Path, prompt: int) -> None:
    """Each has as many tokens as half a second allows: five times the target."""
    model = estimated(write_config(tmp_path, QWEN3_4B))
    steps, start = [], 0
    while start < prompt:
        count = min(model.cost.prompt_tokens(0.5, 2048, start), prompt - start)
        steps.append(model.cost.step_seconds([(start, count)]))
        start += count
    assert max(steps) <= 0.5
    assert model.first_token_s(prompt) == pytest.approx(sum(steps))
    assert (len(steps) > 1) == (prompt > 1000)


@pytest.mark.parametrize("device", [MAC, CPU])
@pytest.mark.parametrize("model", ["Qwen3.5-4B", "Qwen3-30B-A3B"])
def test_chats_are_as_many_as_places_and_memory_allow(
    tmp_path: Path, model: str, device: Device
) -> None:
    planned = estimated(MODELS[model].write(tmp_path, quantization=FOUR_BITS), device)
    memory = planned.plan.memory
    assert planned.chats(16) == memory.max_num_seqs == 32
    longest = memory.max_model_len
    held = memory.kv_budget_bytes // memory.layout.bytes_per_token
    assert planned.chats(longest) in (held // longest - 1, held // longest)


def test_what_the_gpu_may_use_is_believed(tmp_path: Path) -> None:
    checkpoint = promised_checkpoint(write_config(tmp_path, QWEN3_4B))
    for told, usable in ((None, 16), (20 * GIB, 20)):
        mac = MAC.with_memory(24 * GIB, told)
        assert plan_elsewhere(SERVER, checkpoint, mac).memory.demand.machine_bytes == usable * GIB
    with pytest.raises(BudgetError, match="the weights alone take"):
        plan_elsewhere(SERVER, checkpoint, MAC.with_memory(8 * GIB))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_same_model_in_four_bits(tmp_path: Path, on_gpu: bool) -> None:
    folder = write_config(tmp_path, QWEN3_4B)
    shape, checkpoint = read_shape(folder), promised_checkpoint(folder)
    assert checkpoint.stored_bytes == weights_bytes(shape, BF16)
    packed = in_four_bits(shape, checkpoint, on_gpu=on_gpu)
    stored = promised_checkpoint(write_config(tmp_path, QWEN3_4B, quantization=FOUR_BITS))
    size = stored.stored_bytes if on_gpu else stored.packed_bytes
    assert packed.stored_bytes == packed.packed_bytes == pytest.approx(size, rel=0.01)
