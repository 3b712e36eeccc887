"""Gates run side by side, each behind those whose builds it uses."""

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests import gates
from tests.gates import GATES, LANDING, NIGHTLY, Gate, next_gate

ROOT = Path(__file__).parents[1]
WAIT_S = 60.0


def test_the_gates_of_a_tier_stand_behind_those_whose_builds_they_use() -> None:
    for tier in (LANDING, NIGHTLY):
        names = [gate.name for gate in tier]
        assert all(
            names.index(before) < place for place, gate in enumerate(tier) for before in gate.after
        )
        assert len(names) == len(set(names))


def test_a_gate_waits_for_builds_and_for_processors() -> None:
    one, whole = Gate("one", "", after=()), Gate("whole", "", cores=2, after=())
    behind = Gate("behind", "", after=("one",))
    assert next_gate([one, whole], [], cores=2) is one
    assert next_gate([whole, behind], [one], cores=2) is None
    assert next_gate([behind, one], [], cores=2) is one
    assert next_gate([behind], [whole], cores=2) is None
    assert next_gate([whole], [], cores=1) is whole, "it runs alone where it never fits"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gates, "LOGS", tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own handlers stay
    return tmp_path


@pytest.mark.parametrize(
    ("command", "passed"),
    [("echo fine", True), ("echo broken; false", False), ("kill -9 $$", False)],
)
def test_a_gate_that_fails_is_shown_and_keeps_none_from_running(
    logs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    passed: bool,
) -> None:
    tried = {"tried": Gate("tried", command, after=()), "next": Gate("next", "true", after=())}
    monkeypatch.setattr(gates, "GATES", tried)
    assert gates.main(["tried", "next"]) == (not passed)
    output = capsys.readouterr().out
    assert f"--- tried: {command}\n" in output
    assert bool(re.search(r"^ +\d+:\d\d  tried  FAILED$", output, re.MULTILINE)) != passed
    assert output.splitlines()[-1] == f"gates: {1 + passed} passed, {1 - passed} failed"


def test_a_gate_that_hangs_is_killed_with_all_that_it_has_started(logs: Path) -> None:
    hung = Gate("hung", "sleep 60 & sleep 60", after=(), limit_min=0)
    before = len(psutil.Process().children(recursive=True))
    (run,) = gates.run_all([hung])
    assert not run.passed
    assert len(psutil.Process().children(recursive=True)) == before


def test_gates_end_with_the_command_that_runs_them(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests import gates\n"
        "gates.LOGS = Path(sys.argv[1])\n"
        "gates.GATES = {'long': gates.Gate('long', 'sleep 60', after=())}\n"
        "sys.exit(gates.main(['long']))"
    )
    process = psutil.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    while not (children := process.children(recursive=True)):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 1
    # Without a parent they may never be reaped.
    assert all(not each.is_running() or each.status() == "zombie" for each in children)


def test_continuous_integration_runs_the_tier_that_protects_users() -> None:
    assert "-m tests.gates landing" in (ROOT / ".ci/run").read_text()
    assert {"test", "native", "metal-core", "clients", "page", "soak", "fuzz"} <= set(GATES)
