import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import plan_engine, plan_memory
from engine.machine import MachineMemory, gpu_memory
from engine.models.checkpoint import promised_checkpoint
from engine.models.config import Quantization
from engine.planning import capacity
from engine.planning.capacity import (
    MEAN_LENGTHS,
    PAGE_SIZES,
    TABLE_ENTRY_BYTES,
    CapacityReport,
    account,
    block_account,
    plan_capacity,
    tail_tokens,
)
from engine.planning.devices import CPU, Device, find_device
from engine.planning.memory import ModelShape, read_shape
from kvcache.block import Block, PageTable, SparseBuffer
from kvcache.kv_backends import KVBackend, KVBackendChoice
from kvcache.layout import KVShape, KVSpec, LayoutError, paged_layout
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


@pytest.fixture(autouse=True, scope="module")
def few_requests() -> Iterator[None]:
    """Three simulations of sixteen requests take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "REQUESTS", 16)
        yield


@pytest.fixture(scope="module")
def report(qwen3_4b: ModelShape, device: Device, few_requests: None) -> CapacityReport:
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
    assert report.steps[0].room.kv_bytes == served.usable_bytes - served.fixed_bytes
    for step in report.steps:
        left = report.demand.usable_bytes - report.demand.fixed_bytes - step.resident.weights_bytes
        assert step.room.kv_bytes == max(0, left)
        assert step.contexts == step.room.kv_bytes // step.resident.kv_bytes


def test_a_gpu_that_says_what_it_may_use_is_believed(qwen3_4b: ModelShape, device: Device) -> None:
    told = plan_capacity(qwen3_4b, device, 18 * GIB, CONTEXT, SERVER, working_set_bytes=9 * GIB)
    assert (told.memory_bytes, told.demand.machine_bytes) == (18 * GIB, 9 * GIB)


def test_smaller_packings_hold_more_sequences(report: CapacityReport) -> None:
    assert [fit.weights.name for fit in report.fits] == ["bf16", "q8", "q4"]
    for column in zip(*(fit.whole_context + fit.mean_length for fit in report.fits), strict=True):
        assert column[0] <= column[1] <= column[2]
        assert column[0] < column[2]


def test_what_quire_would_start_with_is_told_in_tokens(
    qwen3_4b: ModelShape, device: Device, tmp_path: Path
) -> None:
    """Of a working set of 5.33 GiB; serving and planning agree, and refuse the same."""
    report = plan_capacity(qwen3_4b, device, 8 * GIB, CONTEXT, SERVER)
    folder = write_config(tmp_path, QWEN3_4B, quantization={"group_size": 64, "bits": 4})
    checkpoint = promised_checkpoint(folder, report.steps[-1].resident.weights_bytes)
    machine = gpu_memory(MachineMemory(8 * GIB, GIB), 8 * GIB * 2 // 3)
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    memory = plan_engine(config, checkpoint, machine, KVBackendChoice(KVBackend.SPARSE, ())).memory
    served = memory.kv_budget_bytes // memory.layout.groups[0].bytes_per_token
    assert [fit.tokens for fit in report.fits] == [0, 0, served]
    assert served > CONTEXT
    assert memory.warning is not None


def test_smaller_units_hold_more_short_sequences(report: CapacityReport) -> None:
    assert report.mean_tokens < CONTEXT / 2
    for fit in report.fits:
        dense, chunks, sparse = fit.mean_length
        assert dense < chunks <= sparse
        assert fit.whole_context[0] == dense, "dense charges every sequence for the whole context"


def test_allocations_charge_by_their_unit(report: CapacityReport) -> None:
    dense, chunks, sparse = report.allocations
    token = 144 * 1024
    assert [a.committed_bytes(1) // token for a in (dense, chunks, sparse)] == [CONTEXT, 256, 32]
    assert [a.committed_bytes(257) // token for a in (dense, chunks, sparse)] == [CONTEXT, 512, 288]


def test_the_crowd_runs_in_the_widest_packing_that_fits(
    report: CapacityReport, qwen3_4b: ModelShape, device: Device
) -> None:
    assert report.crowd is not None
    assert report.crowd.weights.name == "bf16"
    assert [r.peak_running for r in report.crowd.reports] == sorted(
        r.peak_running for r in report.crowd.reports
    )
    small = plan_capacity(qwen3_4b, device, 12 * GIB, CONTEXT, SERVER)
    assert small.crowd is not None
    assert small.crowd.weights.name == "q8"
    assert small.steps[0].contexts == 0


def test_the_crowd_of_a_packed_model_runs_in_its_own_packing(
    qwen3_4b: ModelShape, device: Device
) -> None:
    packed = replace(qwen3_4b, quantization=Quantization(4, 32))
    crowd = plan_capacity(packed, device, 18 * GIB, CONTEXT, SERVER).crowd
    assert crowd is not None
    assert (crowd.weights.name, crowd.weights.bits) == ("q4", 5)


def test_no_crowd_runs_where_not_one_sequence_fits(qwen3_4b: ModelShape, device: Device) -> None:
    report = plan_capacity(qwen3_4b, device, 3 * GIB, CONTEXT, SERVER)
    assert report.crowd is None
    assert all(step.room.kv_bytes == 0 for step in report.steps)


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
    checkpoint = promised_checkpoint(hybrid, report.steps[-1].resident.weights_bytes)
    machine = gpu_memory(MachineMemory(memory * GIB, memory * GIB), memory * GIB * 2 // 3)
    config = replace(SERVER, max_model_len=CONTEXT, kv_budget_bytes=None)
    served = plan_memory(config, checkpoint, machine, KVBackend.SPARSE)
    assert fit.room.num_slots == served.num_slots
    assert fit.room.total_bytes - fit.room.kv_bytes == served.state_bytes > 0
    # More than all sequences at full length can use serving leaves to others.
    most = (SERVER.max_num_seqs * CONTEXT + served.layout.heap_tokens) * 32 * KIB
    assert served.kv_budget_bytes == pytest.approx(min(fit.room.kv_bytes, most), abs=64 * MIB)
    assert fit.mean_length[-1] <= served.max_num_seqs == served.num_slots // 3
    assert report.crowd is not None
    ours = report.crowd.reports[-1]
    assert ours.peak_running == fit.mean_length[-1] or ours.peak_running == capacity.REQUESTS
    assert 0 < ours.peak_committed_bytes <= report.crowd.room.total_bytes


def test_a_model_without_room_for_its_states_does_not_fit(hybrid: Path, device: Device) -> None:
    report = plan_capacity(read_shape(hybrid), device, 4 * GIB, CONTEXT, SERVER)
    assert {step.room.kv_bytes for step in report.steps} == {0}
    assert {step.contexts for step in report.steps} == {0}
    assert report.crowd is None


def test_a_plan_says_what_is_not_served_there(tmp_path: Path, device: Device) -> None:
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    shape = read_shape(PUBLISHED["Qwen3.5-4B"].write(tmp_path, **heads))
    assert plan_capacity(shape, CPU, 2 * GIB, CONTEXT, SERVER).problem is None
    gpu = plan_capacity(shape, device, 2 * GIB, CONTEXT, SERVER)
    assert gpu.problem is not None
    assert "heads of 64 dimensions, and the GPU's kernels know 128" in gpu.problem


SHAPE_4B = KVShape.uniform(36, KVSpec(8, 128))
HEAP_BYTES = 64 * KIB * KIB


def table(blocks: Iterable[Block]) -> PageTable:
    made = PageTable()
    made.append(blocks, writable=True)
    return made


@pytest.mark.parametrize(("block", "mean"), [(1, 5), (2, 1), (32, 256), (32, 10), (128, 1000)])
def test_the_tail_is_the_exact_mean_over_all_lengths(block: int, mean: int) -> None:
    tails = [-length % block for length in range(1, 2 * mean)]
    assert tail_tokens(block, mean) == pytest.approx(sum(tails) / len(tails))


def test_long_sequences_waste_half_a_block() -> None:
    assert tail_tokens(32, 100_000) == pytest.approx(15.5, abs=0.01)


def test_a_larger_page_wastes_more_and_is_mapped_less_often() -> None:
    accounts = account(SHAPE_4B, CPU, HEAP_BYTES)
    assert [a.page_bytes for a in accounts[:: len(MEAN_LENGTHS)]] == list(PAGE_SIZES)
    for mean in MEAN_LENGTHS:
        lines = [a for a in accounts if a.mean_tokens == mean]
        waste = [a.waste for a in lines]
        assert waste == sorted(waste)
        times = [a.mapping_s_per_token for a in lines]
        assert times == sorted(times, reverse=True)
        tables = [a.table_bytes for a in lines]
        assert tables == sorted(tables, reverse=True)


def test_the_block_of_qwen3_4b_is_accounted_for() -> None:
    layout = paged_layout(SHAPE_4B, max_tokens=4096, heap_bytes=HEAP_BYTES, system_page_bytes=4096)
    line = block_account(layout, layout.groups[0].page_bytes, CPU, 4096)
    assert (line.page_bytes, line.tokens_per_block) == (64 * KIB, 32)
    assert line.mappings_scattered == 72 * 128
    assert line.mappings_merged == 72 * 10, "14 blocks of a heap are one mapping per region"
    assert line.mapping_s_per_token == pytest.approx(72 * 3.2e-6 / 32)


def test_the_mappings_are_those_of_the_page_table() -> None:
    """But for the gap behind the last block, which the table counts as one more."""
    layout = paged_layout(SHAPE_4B, max_tokens=4096, heap_bytes=HEAP_BYTES, system_page_bytes=4096)
    line = block_account(layout, layout.groups[0].page_bytes, CPU, 1024)
    full = layout.groups[0].blocks_per_heap
    merged = table(Block(n // full, n % full) for n in range(32))
    scattered = table(Block(0, 2 * n) for n in range(32))
    assert SparseBuffer(0, merged).mappings(72) - 72 == line.mappings_merged
    assert SparseBuffer(0, scattered).mappings(72) - 72 == line.mappings_scattered


def test_a_batch_of_metal_mappings_costs_the_same_whatever_is_in_it() -> None:
    device = find_device("M4")
    assert device is not None
    line = account(SHAPE_4B, device, HEAP_BYTES)[0]
    assert line.tokens_per_block == 2
    assert line.mapping_s_per_token == pytest.approx(0.15e-3 / 2)


def test_the_table_costs_what_python_takes_for_it() -> None:
    empty, full = PageTable(), table(Block(1000, n) for n in range(1000))
    grown = sys.getsizeof(full.blocks) - sys.getsizeof(empty.blocks)
    grown += sum(sys.getsizeof(block) for block in full.blocks)
    assert grown == pytest.approx(1000 * TABLE_ENTRY_BYTES, rel=0.1)


def test_a_page_that_a_row_does_not_divide_is_left_out() -> None:
    wide = KVShape.uniform(2, KVSpec(8, 512))
    assert {a.page_bytes for a in account(wide, CPU, HEAP_BYTES)} == set(PAGE_SIZES[1:])
