from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import plan_engine, plan_memory
from engine.machine import MachineMemory, gpu_memory
from engine.models.checkpoint import promised_checkpoint
from engine.models.config import Quantization
from engine.planning.capacity import (
    CapacityReport,
    plan_capacity,
)
from engine.planning.devices import CPU, Device, find_device
from engine.planning.memory import ModelShape, read_shape
from kvcache.kv_backends import KVBackend, KVBackendChoice
from kvcache.layout import LayoutError
from tests.engines import CONFIG
from tests.families import PUBLISHED
from tests.models import QWEN3_4B, write_config

KIB = 1024
MIB = 1024**2
GIB = 1024**3
CONTEXT = 4096
SERVER = replace(
    CONFIG,
    page_bytes=None,
    heap_bytes=64 * MIB,
    headroom_bytes=None,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    step_time_target_ms=100.0,
)


@pytest.fixture(scope="module")
def device() -> Device:
    found = find_device("M5 Max")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def report(qwen3_4b: ModelShape, device: Device) -> CapacityReport:
    return plan_capacity(qwen3_4b, device, 18 * GIB, CONTEXT, SERVER)


def test_what_is_left_to_the_cache_is_what_serving_would_leave(
    report: CapacityReport, qwen3_4b: ModelShape, tmp_path: Path
) -> None:
    """A Mac with 18 GiB: its GPU may use 12 of them, and 1.5 of those are left to others."""
    machine = gpu_memory(MachineMemory(18 * GIB, 18 * GIB), 12 * GIB)
    folder = write_config(tmp_path, QWEN3_4B)
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    choice = KVBackendChoice(KVBackend.SPARSE, ())
    checkpoint = promised_checkpoint(folder, 2 * qwen3_4b.parameters)
    served = plan_engine(config, checkpoint, machine, choice).memory.demand
    assert served.usable_bytes == 10.5 * GIB
    assert report.demand == replace(served, weights_bytes=0)
    assert report.fits[0].room.kv_bytes == served.usable_bytes - served.fixed_bytes
    for fit in report.fits:
        left = report.demand.usable_bytes - report.demand.fixed_bytes - fit.resident.weights_bytes
        assert fit.room.kv_bytes == max(0, left)


def test_a_gpu_that_says_what_it_may_use_is_believed(qwen3_4b: ModelShape, device: Device) -> None:
    told = plan_capacity(qwen3_4b, device, 18 * GIB, CONTEXT, SERVER, working_set_bytes=9 * GIB)
    assert (told.memory_bytes, told.demand.machine_bytes) == (18 * GIB, 9 * GIB)


def test_smaller_packings_hold_more_sequences(report: CapacityReport) -> None:
    assert [fit.resident.weights.name for fit in report.fits] == ["bf16", "q8", "q4"]
    for column in zip(*(fit.whole_context + fit.fifth_context for fit in report.fits), strict=True):
        assert column[0] <= column[1] <= column[2]
        assert column[0] < column[2]


def test_what_quire_would_start_with_is_told_in_tokens(
    qwen3_4b: ModelShape, device: Device, tmp_path: Path
) -> None:
    """Of a working set of 5.33 GiB; serving and planning agree, and refuse the same."""
    report = plan_capacity(qwen3_4b, device, 8 * GIB, CONTEXT, SERVER)
    folder = write_config(tmp_path, QWEN3_4B, quantization={"group_size": 64, "bits": 4})
    checkpoint = promised_checkpoint(folder, report.fits[-1].resident.weights_bytes)
    machine = gpu_memory(MachineMemory(8 * GIB, GIB), 8 * GIB * 2 // 3)
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    memory = plan_engine(config, checkpoint, machine, KVBackendChoice(KVBackend.SPARSE, ())).memory
    served = memory.kv_budget_bytes // memory.layout.groups[0].bytes_per_token
    assert [fit.tokens for fit in report.fits] == [0, 0, served]
    assert served > CONTEXT
    assert memory.warning is not None


def test_smaller_units_hold_more_short_sequences(report: CapacityReport) -> None:
    assert report.fifth_tokens == CONTEXT // 5
    for fit in report.fits:
        dense, chunks, sparse = fit.fifth_context
        assert dense < chunks <= sparse
        assert fit.whole_context[0] == dense, "dense charges every sequence for the whole context"


def test_allocations_charge_by_their_unit(report: CapacityReport) -> None:
    dense, chunks, sparse = report.allocations
    token = 144 * 1024
    blocks = [a.layout.block_bytes // token for a in (dense, chunks, sparse)]
    assert blocks == [CONTEXT, 256, 32]
    assert [a.layout.blocks_for(257) for a in (dense, chunks, sparse)] == [1, 2, 9]


def test_a_packed_model_is_planned_in_its_own_packing(qwen3_4b: ModelShape, device: Device) -> None:
    packed = replace(qwen3_4b, quantization=Quantization(4, 32))
    (fit,) = plan_capacity(packed, device, 18 * GIB, CONTEXT, SERVER).fits
    assert (fit.resident.weights.name, fit.resident.weights.bits) == ("q4", 5)


def test_nothing_fits_where_weights_leave_no_room(qwen3_4b: ModelShape, device: Device) -> None:
    report = plan_capacity(qwen3_4b, device, 3 * GIB, CONTEXT, SERVER)
    assert all(fit.room.kv_bytes == 0 for fit in report.fits)


def test_a_row_that_divides_no_page_is_refused(tmp_path: Path, device: Device) -> None:
    odd = read_shape(write_config(tmp_path, replace(QWEN3_4B, head_dim=129)))
    with pytest.raises(LayoutError, match="divide no page"):
        plan_capacity(odd, device, 18 * GIB, CONTEXT, SERVER)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    return PUBLISHED["Qwen3.5-4B"].write(folder, quantization={"group_size": 64, "bits": 4})


@pytest.mark.parametrize("memory", [8, 16, 24])
def test_states_are_planned_as_serving_would_have_them(
    hybrid: Path, device: Device, memory: int
) -> None:
    report = plan_capacity(read_shape(hybrid), device, memory * GIB, CONTEXT, SERVER)
    fit = report.fits[-1]
    checkpoint = promised_checkpoint(hybrid, report.fits[-1].resident.weights_bytes)
    machine = gpu_memory(MachineMemory(memory * GIB, memory * GIB), memory * GIB * 2 // 3)
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    served = plan_memory(config, checkpoint, machine, KVBackend.SPARSE)
    assert fit.room.num_slots == served.num_slots
    assert fit.room.num_slots * fit.room.slot_bytes == served.state_bytes > 0
    # More than all sequences at full length can use serving leaves to others.
    most = (SERVER.max_num_seqs * CONTEXT + served.layout.heap_tokens) * 32 * KIB
    assert served.kv_budget_bytes == pytest.approx(min(fit.room.kv_bytes, most), abs=64 * MIB)
    assert 0 < fit.fifth_context[-1] <= served.max_num_seqs == served.num_slots // 3


def test_a_model_without_room_for_its_states_does_not_fit(hybrid: Path, device: Device) -> None:
    report = plan_capacity(read_shape(hybrid), device, 4 * GIB, CONTEXT, SERVER)
    assert {fit.room.kv_bytes for fit in report.fits} == {0}
    assert {fit.whole_context for fit in report.fits} == {(0, 0, 0)}


def test_a_plan_says_what_is_not_served_there(tmp_path: Path, device: Device) -> None:
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    shape = read_shape(PUBLISHED["Qwen3.5-4B"].write(tmp_path, **heads))
    assert plan_capacity(shape, CPU, 2 * GIB, CONTEXT, SERVER).problem is None
    gpu = plan_capacity(shape, device, 2 * GIB, CONTEXT, SERVER)
    assert gpu.problem is not None
    assert "heads of 64 dimensions, and the GPU's kernels know 128" in gpu.problem
