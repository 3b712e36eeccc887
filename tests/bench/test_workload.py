from pathlib import Path

import pytest

from engine.planning.arithmetic import BF16
from engine.planning.cost import CostModel
from engine.planning.devices import find_device
from engine.planning.shape import read_shape
from engine.planning.simulator import Simulation, SimulationLimits
from engine.types import FinishReason, TokenEvent
from kvcache.layout import KVFormat, KVShape, KVSpec, paged_layout
from tests.bench.agents import MIB, MOST_WASTE_PERCENT, PAGE_BYTES, TOKENS_PER_BLOCK, dense_bytes
from tests.bench.models import SERVING
from tests.bench.peers import BrokenError
from tests.bench.workload import AGENTS, Moment, Run, check_answers, fifty_agents, run_engine
from tests.models import write_config

SHAPE = KVShape.uniform(2, KVSpec(1, 32, KVFormat.FLOAT32))


def serve_agents(folder: Path, model_len: int, *, places: int = AGENTS) -> Run:
    """By the real scheduler and cache, on a clock and on blocks without bytes."""
    device = find_device("M5 Max")
    assert device is not None
    layout = paged_layout(
        SHAPE, max_tokens=model_len, heap_bytes=MIB, system_page_bytes=4096, page_bytes=PAGE_BYTES
    )
    assert layout.groups[0].tokens_per_block == TOKENS_PER_BLOCK
    limits = SimulationLimits(
        kv_budget_bytes=dense_bytes(model_len, len(SHAPE.layers)),
        max_model_len=model_len,
        max_num_seqs=places,
        max_num_batched_tokens=2048,
        step_time_target_s=0.1,
    )
    cost = CostModel.of(read_shape(write_config(folder / "shape", SERVING)), device, BF16, BF16)
    return run_engine(Simulation(layout, cost, limits, []).loop, fifty_agents(0))


def test_fifty_agents_run_at_once_on_the_memory_of_twelve_dense_sequences(tmp_path: Path) -> None:
    run = serve_agents(tmp_path, 4096)
    assert run.peak_running == AGENTS
    assert not run.crowded
    assert 0 < run.waste_percent < MOST_WASTE_PERCENT


def test_with_half_of_it_nothing_that_fits_waits(tmp_path: Path) -> None:
    run = serve_agents(tmp_path, 2048)
    assert len(run.crowded) > 100
    assert run.mean_running > 2 * 12
    assert 0 < run.waste_percent < MOST_WASTE_PERCENT


def test_who_waits_although_there_is_room_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match=r"blocks are free, and one waits that needs \d+"):
        serve_agents(tmp_path, 4096, places=10)


def test_agents_follow_their_seed_and_begin_alike() -> None:
    agents = fifty_agents(3)
    assert agents == fifty_agents(3) != fifty_agents(4)
    assert len({request.prompt_ids[:200] for request in agents}) == 1
    assert len({request.prompt_ids[:232] for request in agents}) == AGENTS
    assert all(625 <= len(request.prompt_ids) <= 1025 for request in agents)
    assert all(100 <= request.params.max_tokens <= 500 for request in agents)


def test_means_are_taken_while_somebody_waits() -> None:
    moments = [Moment(4, 2, 30, 10, 64), Moment(6, 1, 90, 10, 128), Moment(2, 0, 60, 0, 96)]
    run = Run(moments, 1.0, 0, 0)
    assert (run.mean_running, run.peak_running) == (5.0, 6)
    assert run.waste_percent == pytest.approx(100 * (0.25 + 0.1 + 0) / 3)
    assert (run.peak_waste_percent, run.peak_committed_bytes) == (25.0, 128)
    assert Run(moments[2:], 1.0, 0, 0).mean_running == 2.0


def test_an_answer_that_is_not_whole_is_noticed() -> None:
    agents = fifty_agents(0)[:1]
    wanted = agents[0].params.max_tokens
    events = [TokenEvent(1, 5, None)] * (wanted - 1)
    check_answers(agents, [*events, TokenEvent(1, 5, FinishReason.LENGTH)])
    with pytest.raises(BrokenError, match=f"{wanted - 1} of {wanted} tokens came"):
        check_answers(agents, [*events[1:], TokenEvent(1, 5, FinishReason.LENGTH)])
    with pytest.raises(BrokenError, match="ERROR, a fault"):
        check_answers(agents, [*events, TokenEvent(1, None, FinishReason.ERROR, None, "a fault")])
