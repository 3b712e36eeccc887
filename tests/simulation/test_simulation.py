"""A short, fixed part of ``make simulate``: seeds pass, a seed is the same life in any process, a
failure is printed with its trace; and an hour of a Mac whose system warns all along."""

import pytest

import tests.simulation.runner
from kvcache.budget import GIB
from tests.metal_ext.programs import output_of
from tests.simulation.__main__ import main
from tests.simulation.mac import AVAILABLE_BYTES, PEOPLE, WORKING_SET_BYTES, mac_hour, mac_plan
from tests.simulation.seeds import explain, run_seeds

EVENTS = (
    "ends: a step of the engine failed",
    "ends: aborted",
    "ends: length",
    "ends: stop",
    "ends: the model's output was not finite",
    "ends: the rules for the answer's form could not be followed",
    "ends: the system has no memory for it",
    "engines ended by their device",
    "engines ended by their memory",
    "engines ended by their model",
    "blocks copied",
    "drafts kept",
    "drafts rejected",
    "failed steps",
    "forks",
    "mapping waits",
    "models tried",
    "preemptions",
    "prefix hits",
    "prefix misses: evicted",
    "prefix misses: never_cached",
    "prefix misses: no_state",
    "prefix misses: none",
    "prefix misses: state_evicted",
    "prompts scored",
    "refusals",
    "rows wasted",
    "sequences of dropped steps",
    "slow readers cut",
    "stalls",
    "states set back",
    "steps that waited for tokens",
    "times short of memory",
    "vectors",
)
# Returning prompts on a disk that seldom fails.
DISK = {"dense": False, "prefixes": True, "disk": 0.001, "turns": 0.5, "repeats": 0.5}
DISK_EVENTS = (
    "bytes read from disk",
    "bytes written to disk",
    "disk failures",
    "prefix misses: disk_late",
    "prefix misses: disk_slower",
)
# Seeds, the switches that none of them draws, and what happens under them.
LIVES = {
    "all switches at random": (range(128), {}, EVENTS),
    "with a disk": (range(250, 330), DISK, DISK_EVENTS),
}
ONE_SEED = "from tests.simulation.seeds import run_seeds; print(sorted(run_seeds([{}])[0].items()))"


@pytest.mark.parametrize("lives", LIVES)
def test_seeds_pass_and_everything_happens_under_them(lives: str) -> None:
    seeds, forced, events = LIVES[lives]
    counts, failures = run_seeds(seeds, forced)
    assert not failures, "\n\n".join(map(explain, failures[:3]))
    assert [event for event in events if not counts[event]] == []


@pytest.mark.parametrize("seed", [3, 20])
def test_a_seed_is_the_same_life_in_any_process(seed: int) -> None:
    told = [output_of(ONE_SEED.format(seed), PYTHONHASHSEED=number) for number in ("1", "2")]
    counts, _ = run_seeds([seed])
    assert told == [str(sorted(counts.items()))] * 2


def test_a_failing_seed_is_told_with_its_trace_and_its_switches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tests.simulation.runner, "next_token", lambda *_: -1)
    assert main(["--seed", "1"]) == 1
    told = capsys.readouterr().out
    assert "seed 1: SimulationError: request" in told
    assert "switches: --" in told


# --- an hour of a Mac -----------------------------------------------------------------------------


def test_the_budget_is_the_working_sets_whatever_is_available() -> None:
    memory = mac_plan()
    taken = memory.demand.fixed_bytes + memory.kv_budget_bytes
    left = WORKING_SET_BYTES - taken
    assert 1.5 * GIB <= left < 1.5 * GIB + memory.layout.groups[0].heap_bytes
    assert taken > 2 * AVAILABLE_BYTES
    assert memory.warning is not None


def test_fault_25_an_hour_of_warnings_makes_nobody_wait_and_loses_no_prefix() -> None:
    counts = mac_hour()
    assert counts["most at once"] >= PEOPLE
    assert counts["prefix misses: evicted"] == 0
    assert counts["prefix hits"] > 0.9 * counts["requests"]
    assert counts["ends: length"] + counts["ends: stop"] == counts["requests"]
