"""A short, fixed part of ``make simulate``; and that a seed is a life, and a failure is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.simulation.runner
from tests.simulation.__main__ import main
from tests.simulation.faults import SimulationError
from tests.simulation.runner import SlotRunner
from tests.simulation.seeds import SEEDS_FILE, add_up, kept_seeds, run_seeds

SEEDS = 100
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
    "failed steps",
    "forks",
    "mapping waits",
    "models tried",
    "preemptions",
    "prefix hits",
    "prefix misses: evicted",
    "prefix misses: never_cached",
    "prefix misses: none",
    "prompts scored",
    "refusals",
    "rows wasted",
    "slow readers cut",
    "stalls",
    "steps that waited for tokens",
    "times short of memory",
    "vectors",
)
ONE_SEED = "from tests.simulation.seeds import run_seeds; print(sorted(run_seeds([{}])[0].items()))"


def test_seeds_pass_and_everything_happens_under_them() -> None:
    counts, failures = run_seeds([*kept_seeds(SEEDS_FILE), *range(SEEDS)])
    assert not failures, "\n\n".join(map(str, failures[:3]))
    assert [event for event in EVENTS if not counts[event]] == []


def test_seeds_pass_where_the_layers_are_of_two_kinds() -> None:
    counts, failures = run_seeds(range(SEEDS // 4), groups=2)
    assert not failures, "\n\n".join(map(str, failures[:3]))
    assert counts["prefix hits"]


def test_seeds_pass_where_layers_are_recurrent() -> None:
    counts, failures = run_seeds([20992, *range(SEEDS // 2)], states=True)
    assert not failures, "\n\n".join(map(str, failures[:3]))
    happens = ("prefix hits", "preemptions", "refusals")
    reasons = ("prefix misses: no_state", "prefix misses: state_evicted")
    assert [event for event in (*happens, *reasons) if not counts[event]] == []


@pytest.mark.parametrize("seed", [3, 20])
def test_a_seed_is_the_same_life_in_any_process(seed: int) -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", ONE_SEED.format(seed)],
            env=os.environ | {"PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for number in ("1", "2")
    ]
    counts, _ = run_seeds([seed])
    assert told == [str(sorted(counts.items()))] * 2


def test_seeds_pass_on_the_command_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "seeds.txt"
    kept.write_text("# a comment\n2  once it failed\n")
    assert main(["--seeds", "2", "--first", "7", "--jobs", "1", "--kept", str(kept)]) == 0
    assert "3 seeds in" in (told := capsys.readouterr().out)
    assert "failed: none" in told
    assert kept_seeds(kept) == [2]


def test_one_seed_is_told_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1"]) == 0
    told = capsys.readouterr().out
    assert "max_num_batched_tokens" in told
    assert "  runs 1[0+" in told


def test_a_failing_seed_is_told_with_its_trace_and_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tests.simulation.runner, "next_token", lambda *_: -1)
    assert main(["--seed", "1"]) == 1
    told = capsys.readouterr().out
    assert "seed 1: SimulationError: request 1" in told
    assert "again: python -m tests.simulation --seed 1" in told


def test_one_failing_seed_is_kept_for_each_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.simulation import __main__ as program

    kept = tmp_path / "seeds.txt"
    kept.write_text("# none yet\n")

    def fail(_: SlotRunner) -> None:
        raise SimulationError("planted")

    monkeypatch.setattr(SlotRunner, "tick", fail)
    monkeypatch.setattr(
        program, "run_seeds_in_processes", lambda seeds, jobs, groups, states: [run_seeds(seeds)]
    )
    for _ in range(2):
        assert main(["--seeds", "3", "--first", "1", "--kept", str(kept)]) == 1
        assert kept_seeds(kept) == [1]


def test_longest_is_not_a_sum() -> None:
    one, other = run_seeds([1])[0], run_seeds([2])[0]
    both = add_up(one, other)
    assert both["longest quiet"] == max(one["longest quiet"], other["longest quiet"]) > 0
    assert both["steps"] == one["steps"] + other["steps"]
