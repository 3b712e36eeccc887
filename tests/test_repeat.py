"""What runs the gates again and again."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from coverage import CoverageData

from tests import repeat

ROOT = Path(__file__).parents[1]
WAIT_S = 60.0
# How many processes this one has started, of which it is one.
COUNT = (
    "import os, psutil; print(len(psutil.Process(os.getppid()).children())); raise SystemExit(1)"
)
# The command with a part whose second run, which is beside a load, lasts.
LASTING = """
import pathlib, sys
from tests import repeat
repeat.GATES = {"lasting": "sh -c 'test -e once && touch twice && exec sleep 60; touch once'"}
repeat.ROOT = repeat.OUTPUT = pathlib.Path(%r)
sys.argv = ["repeat", "lasting", "--times", "2"]
repeat.interruptible_main()
"""


def test_every_gate_is_a_part_with_the_same_options() -> None:
    gates: list[str] = []
    for line in (ROOT / ".ci/run").read_text().splitlines():
        if found := re.match(r" *(?:beside )?gate ([a-z0-9-]+)( [A-Z]+=\".*?\")?", line):
            gates.append(f"make {found[1]}{found[2] or ''}")
    gates.remove("make test")
    assert [gate.replace('"', "'") for gate in gates] == list(repeat.GATES.values())


def test_what_make_test_leaves_to_pytest_is_a_part_by_its_folder() -> None:
    parts = repeat.parts_of_make_test()
    assert {"tests/engine", "tests/metal", "tests/test_tidy.py"} <= set(parts)
    assert "tests/clients" not in parts
    assert repeat.named("tests/engine")[1][-2:] == ("pytest", "tests/engine")


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where that of failed runs is kept."""
    monkeypatch.setattr(repeat, "OUTPUT", tmp_path)
    monkeypatch.setattr(repeat, "COVERAGE", tmp_path / "coverage")
    gates = {"good": "true", "bad": shlex.join((sys.executable, "-c", COUNT)), "slow": "sleep 60"}
    monkeypatch.setattr(repeat, "GATES", gates)
    return tmp_path


def test_a_table_says_what_failed_alone_and_beside_a_load(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(psutil.Process().children())
    assert repeat.main(["good", "bad", "--times", "3"]) == 1
    _, good, bad = capsys.readouterr().out.splitlines()
    assert re.match(r"good +0 of 2 +0 of 1 ", good)
    assert re.match(r"bad +2 of 2 +1 of 1 ", bad)
    alone = before + 1
    said = [int((output / f"bad-{number}.log").read_text()) for number in (1, 2, 3)]
    assert said == [alone, alone, alone + (os.cpu_count() or 1)]
    assert len(list(output.iterdir())) == 3, "nothing is kept of runs that ended well"
    assert len(psutil.Process().children()) == before
    assert repeat.main(["good", "--times", "1"]) == 0


def test_a_part_that_does_not_end_has_failed(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "RUN_LIMIT_S", 0.01)
    before = psutil.Process().children()
    assert repeat.main(["slow", "--times", "1"]) == 1
    assert psutil.Process().children() == before


def test_what_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        repeat.main(["tests/unknown"])
    assert "tests/unknown is neither below tests nor one of native," in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_interrupts_it_leaves_no_load_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", LASTING % str(tmp_path)]
    process = psutil.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "twice").exists():
        assert process.poll() is None
    children = process.children()
    assert len(children) == 1 + (os.cpu_count() or 1)
    process.send_signal(number)
    process.wait(WAIT_S)
    if number == signal.SIGKILL:
        # Nobody is left who could end the part.
        next(child for child in children if child.name() in {"sh", "sleep"}).kill()
    _, left = psutil.wait_procs(children, WAIT_S)
    assert not left


def test_a_branch_that_only_some_rounds_missed_is_named(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    product = ROOT / "engine/mask_turns.py"
    lines = product.read_text().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("    if "))
    taken, passed = (first, first + 1), (first, first + 2)
    for number, ways in enumerate([[taken, passed], [taken]]):
        measured = output / "coverage" / str(number)
        measured.mkdir(parents=True)
        for part, arcs in (("one", ways), ("two", [taken])):
            data = CoverageData(str(measured / part))
            data.add_arcs({str(product): arcs})
            data.write()
    assert repeat.missed_by_chance()
    said = capsys.readouterr().out
    assert f"engine/mask_turns.py:{first} -> {first + 2} was missed in 1 of 2 rounds\n" in said
    assert f"engine/mask_turns.py:{first} -> {first + 1} " not in said


def test_what_all_rounds_missed_is_not_by_chance(output: Path) -> None:
    for number in range(2):
        measured = output / "coverage" / str(number)
        measured.mkdir(parents=True)
        data = CoverageData(str(measured / "one"))
        data.add_arcs({str(ROOT / "engine/mask_turns.py"): [(1, 2)]})
        data.write()
    assert not repeat.missed_by_chance()
