from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.planning.capacity import Allocation, allocations_of
from engine.planning.devices import CostModel, Device, find_device
from engine.planning.memory import BF16, ModelShape
from engine.planning.simulator import (
    MAX_IDLE_STEPS,
    Arrival,
    Moment,
    SimulatedClock,
    Simulation,
    SimulationReport,
    random_arrivals,
)
from engine.types import Request, SamplingParams
from kvcache.layout import KVLayout
from tests.engines import CONFIG

GIB = 1024**3
CONTEXT = 2048
KV_BUDGET_BYTES = 2 * GIB
SIMULATED = EngineConfig(max_num_seqs=64)


def simulation_of(
    layout: KVLayout,
    cost: CostModel,
    arrivals: list[Arrival],
    kv_budget_bytes: int = KV_BUDGET_BYTES,
    config: EngineConfig = SIMULATED,
) -> Simulation:
    sizes = {"max_model_len": CONTEXT, "kv_budget_bytes": kv_budget_bytes}
    return Simulation(layout, cost, config, arrivals, **sizes)


@pytest.fixture(scope="module")
def device() -> Device:
    found = find_device("M5 Max")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def allocations(qwen3_4b: ModelShape, device: Device) -> tuple[Allocation, ...]:
    """Dense, chunks and sparse."""
    config = replace(CONFIG, page_bytes=None, heap_bytes=64 * 1024**2)
    return allocations_of(qwen3_4b, device, CONTEXT, config)


@pytest.fixture(scope="module")
def cost(qwen3_4b: ModelShape, device: Device) -> CostModel:
    return CostModel.of(qwen3_4b, device, BF16)


def crowd(seed: int = 0, requests: int = 32) -> list[Arrival]:
    return random_arrivals(seed, requests=requests, longest_tokens=CONTEXT, mean_gap_s=0.01)


def test_arrivals_follow_their_seed_and_fit_the_context() -> None:
    arrivals = crowd(3)
    assert arrivals == crowd(3) != crowd(4)
    assert all(1 < arrival.tokens <= CONTEXT for arrival in arrivals)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert len({arrival.request.salt for arrival in arrivals}) == len(arrivals), "nobody shares"


def test_even_the_shortest_context_has_a_prompt_and_an_answer() -> None:
    for arrival in random_arrivals(0, requests=20, longest_tokens=2, mean_gap_s=1.0):
        assert (len(arrival.request.prompt_ids), arrival.request.params.max_tokens) == (1, 1)


def test_a_simulation_follows_its_arrivals(
    allocations: tuple[Allocation, ...], cost: CostModel
) -> None:
    def run(seed: int) -> SimulationReport:
        return simulation_of(allocations[2].layout, cost, crowd(seed)).run()

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_more_sequences_run_at_once_the_smaller_the_unit_of_allocation(
    allocations: tuple[Allocation, ...], cost: CostModel, seed: int
) -> None:
    dense, chunks, sparse = (
        simulation_of(allocation.layout, cost, crowd(seed)).run() for allocation in allocations
    )
    assert dense.mean_running < chunks.mean_running < sparse.mean_running
    assert dense.peak_running < chunks.peak_running < sparse.peak_running
    assert dense.peak_running == KV_BUDGET_BYTES // (CONTEXT * 144 * 1024)
    assert dense.mean_wait_s > sparse.mean_wait_s
    assert dense.preemptions == 0, "dense sequences never grow"


def test_every_answer_is_complete_and_no_byte_is_over_budget(
    allocations: tuple[Allocation, ...], cost: CostModel
) -> None:
    arrivals = crowd()
    config = replace(SIMULATED, check_every_step=True)
    simulation = simulation_of(allocations[2].layout, cost, arrivals, GIB // 2, config)
    report = simulation.run()
    assert report.generated_tokens == sum(a.request.params.max_tokens for a in arrivals)
    assert report.preemptions > 0
    assert len(report.waits_s) == len(arrivals)
    assert 0 < report.peak_committed_bytes <= GIB // 2
    assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0


def test_steps_take_the_time_that_the_cost_model_says(
    allocations: tuple[Allocation, ...], cost: CostModel
) -> None:
    request = Request(1, (1,) * 10, SamplingParams(3, temperature=0.0))
    report = simulation_of(allocations[2].layout, cost, [Arrival(5.0, request)]).run()
    steps = [[(0, 10)], [(10, 1)], [(11, 1)]]
    seconds = [cost.step_seconds(step) for step in steps]
    assert [m.end_s - m.start_s for m in report.moments] == pytest.approx(seconds)
    assert report.moments[0].start_s == 5.0, "nothing runs before somebody comes"
    assert report.seconds == pytest.approx(5.0 + sum(seconds))
    assert report.mean_wait_s == pytest.approx(seconds[0])


def test_the_mean_counts_the_time_in_which_others_wait() -> None:
    moments = (
        Moment(0.0, 1.0, running=1, waiting=0, committed_bytes=5),
        Moment(1.0, 2.0, running=4, waiting=2, committed_bytes=9),
        Moment(2.0, 5.0, running=8, waiting=1, committed_bytes=7),
    )
    report = SimulationReport(moments, (1.0, 2.0), 3, 0)
    assert report.mean_running == pytest.approx((4 + 3 * 8) / 4)
    assert replace(report, moments=moments[:1]).mean_running == 1
    assert (report.peak_running, report.peak_committed_bytes) == (8, 9)
    assert (report.mean_wait_s, report.seconds) == (1.5, 5.0)


def test_an_engine_that_stands_still_is_a_bug(
    allocations: tuple[Allocation, ...], cost: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_of(allocations[2].layout, cost, crowd())
    monkeypatch.setattr(simulation.loop, "step", lambda: False)
    for _ in range(MAX_IDLE_STEPS - 1):
        simulation.step()
    with pytest.raises(AssertionError, match="the engine stands still"):
        simulation.step()


def test_time_does_not_run_backwards() -> None:
    clock = SimulatedClock()
    clock.advance(2.5)
    assert clock() == 2.5
    with pytest.raises(AssertionError):
        clock.advance(-1.0)
