from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.checkpoint import promised_checkpoint
from engine.models.config import Quantization
from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.devices import Device, find_device
from engine.planning.estimate import plan_elsewhere
from engine.planning.memory import ModelShape, read_shape
from kvcache.budget import MemoryPlan
from tests.engines import CONFIG
from tests.families import PUBLISHED, Published
from tests.models import QWEN3_4B, write_config

MIB, GIB = 1024**2, 1024**3
CONTEXT = 4096
MODELS = PUBLISHED | {"Qwen3-4B": Published(QWEN3_4B)}
FOUR_BITS = {"group_size": 64, "bits": 4}
SERVER = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=64 * MIB,
    headroom_bytes=None,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    step_time_target_ms=100.0,
)


def chip(name: str, memory_gib: int | None = None) -> Device:
    """memory_gib: None is that of the largest configuration."""
    device = find_device(name)
    assert device is not None
    return device if memory_gib is None else device.with_memory(memory_gib * GIB)


def planned(shape: ModelShape, memory_gib: int) -> CapacityReport:
    return plan_capacity(shape, chip("M5 Max", memory_gib), CONTEXT, SERVER)


def served(folder: Path, memory_gib: int) -> MemoryPlan:
    """The memory that an engine would have."""
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    return plan_elsewhere(config, promised_checkpoint(folder), chip("M5 Max", memory_gib)).memory


@pytest.fixture(scope="module")
def report(qwen3_4b: ModelShape) -> CapacityReport:
    return planned(qwen3_4b, 18)


def test_what_is_left_to_the_cache_is_what_serving_would_leave(
    report: CapacityReport, tmp_path: Path
) -> None:
    """A Mac with 18 GiB: its GPU may use 12 of them, and 1.5 of those are left to others."""
    demand = served(write_config(tmp_path, QWEN3_4B), 18).demand
    assert demand.usable_bytes == 10.5 * GIB
    assert report.demand == replace(demand, weights_bytes=0)
    assert report.fits[0].room.kv_bytes == demand.usable_bytes - demand.fixed_bytes


def test_what_quire_would_start_with_is_told_in_tokens(
    qwen3_4b: ModelShape, tmp_path: Path
) -> None:
    """Of a working set of 5.33 GiB."""
    memory = served(write_config(tmp_path, QWEN3_4B, quantization=FOUR_BITS), 8)
    tokens = memory.kv_budget_bytes // memory.layout.groups[0].bytes_per_token
    assert [fit.tokens for fit in planned(qwen3_4b, 8).fits] == [0, 0, tokens]
    assert tokens > CONTEXT


def test_smaller_packings_hold_more_sequences(report: CapacityReport) -> None:
    assert [fit.resident.weights.name for fit in report.fits] == ["bf16", "q8", "q4"]
    for column in zip(*(fit.whole_context + fit.fifth_context for fit in report.fits), strict=True):
        assert column[0] <= column[1] <= column[2]
        assert column[0] < column[2]


def test_smaller_units_hold_more_short_sequences(report: CapacityReport) -> None:
    assert report.fifth_tokens == CONTEXT // 5
    for fit in report.fits:
        dense, chunks, sparse = fit.fifth_context
        assert dense < chunks <= sparse
        assert fit.whole_context[0] == dense, "dense charges every sequence for the whole context"


def test_allocations_charge_by_their_unit(report: CapacityReport) -> None:
    token = 144 * 1024
    layouts = [allocation.layout for allocation in report.allocations]
    assert [layout.block_bytes // token for layout in layouts] == [CONTEXT, 256, 32]
    assert [layout.blocks_for(257) for layout in layouts] == [1, 2, 9]


def test_a_packed_model_is_planned_in_its_own_packing(qwen3_4b: ModelShape) -> None:
    (fit,) = planned(replace(qwen3_4b, quantization=Quantization(4, 32)), 18).fits
    assert (fit.resident.weights.name, fit.resident.weights.bits) == ("q4", 5)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    return PUBLISHED["Qwen3.5-4B"].write(folder, quantization=FOUR_BITS)


@pytest.mark.parametrize("memory_gib", [8, 16, 24])
def test_states_are_planned_as_serving_would_have_them(hybrid: Path, memory_gib: int) -> None:
    fit = planned(read_shape(hybrid), memory_gib).fits[-1]
    memory = served(hybrid, memory_gib)
    assert fit.room.num_slots == memory.num_slots > 0
    # More than all sequences at full length can use serving leaves to others.
    most = (SERVER.max_num_seqs * CONTEXT + memory.layout.heap_tokens) * 32 * 1024
    assert memory.kv_budget_bytes == pytest.approx(min(fit.room.kv_bytes, most), abs=64 * MIB)
    assert 0 < fit.fifth_context[-1] <= memory.max_num_seqs


def test_a_model_without_room_for_its_states_does_not_fit(hybrid: Path) -> None:
    (fit,) = planned(read_shape(hybrid), 4).fits
    assert (fit.room.kv_bytes, fit.whole_context) == (0, (0, 0, 0))
