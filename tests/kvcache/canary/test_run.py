"""Whatever a trial's process does, its parent gets a report."""

import subprocess
import sys
import time

import pytest

from kvcache.canary import run
from kvcache.canary.report import Step, TrialReport, to_line
from kvcache.canary.run import KERNELS, SUBSTRATE, run_program, run_trial
from kvcache.substrates import Substrate
from tests.metal_ext.programs import output_of

LIMIT_S = 60.0
BEGIN = "import sys; print('canary begins: map', file=sys.stderr, flush=True); "


def report_of(program: str, limit_s: float = LIMIT_S) -> TrialReport:
    return run_program([sys.executable, "-c", program], limit_s)


def test_a_trial_that_ends_well_is_read() -> None:
    line = to_line([Step("map", True, "fine", 0.0)])
    report = report_of(f"print('chatter'); print({line!r})")
    assert report.passed
    assert [step.name for step in report.steps] == ["map"]
    assert report.seconds > 0


def test_a_step_that_failed_is_the_fault() -> None:
    line = to_line([Step("map", True, "", 0.0), Step("read", False, "wrong", 0.0)])
    report = report_of(f"print({line!r})")
    assert report.fault == "read: wrong"
    assert len(report.steps) == 2


def test_a_crash_is_a_result_that_names_the_signal_and_the_step() -> None:
    report = report_of(BEGIN + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert report.fault == "it was ended by signal 11 (Segmentation fault), in the step 'map'"


def test_a_hang_is_a_result_and_the_process_is_ended() -> None:
    started = time.monotonic()
    # A shell has begun long before an interpreter would.
    hanging = ["sh", "-c", "echo 'canary begins: map' >&2; exec sleep 600"]
    report = run_program(hanging, limit_s=2.0)
    assert report.fault == "it took over 2 s, in the step 'map'"
    assert time.monotonic() - started < LIMIT_S


def test_a_process_that_does_not_even_end_when_it_is_killed_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    class Undead:
        def wait(self, timeout_s: float) -> int:
            waited.append(timeout_s)
            raise subprocess.TimeoutExpired("undead", timeout_s)

        def kill(self) -> None:
            waited.append(0.0)

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Undead())
    assert run_program(["undead"], 7.0).fault == "it took over 7 s"
    assert waited == [7.0, 0.0, run.LAST_WORDS_S]


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("print('hello')", "it said what cannot be read: not a report: 'hello'"),
        ("import os; os.write(1, bytes(range(128, 256)))", "it said what cannot be read"),
        ("print('{\"steps\": []}')", "it said what cannot be read: a report of nothing"),
        ("pass", "it said what cannot be read: not a report: ''"),
        ("raise SystemExit(3)", "it ended with exit code 3: it said nothing"),
        ("import no_such_module", "it ended with exit code 1: ModuleNotFoundError: No module"),
        (BEGIN + "raise OSError('no')", "exit code 1, in the step 'map': OSError: no"),
    ],
)
def test_garbage_and_exit_codes_are_results(program: str, fault: str) -> None:
    report = report_of(program)
    assert fault in report.fault
    assert report.steps == ()
    assert not report.passed


@pytest.mark.parametrize("page_bytes", [None, 16384])
def test_the_substrate_of_this_machine_passes_its_canary(page_bytes: int | None) -> None:
    report = run_trial(SUBSTRATE, Substrate.POSIX, page_bytes)
    assert report.fault == ""
    names = [step.name for step in report.steps]
    assert names[0] == "open"
    assert names[-5:] == ["release", "end", "multiply 1", "multiply 8", "multiply 64"]
    assert "share" in names
    if page_bytes is not None:
        assert str(page_bytes) in report.steps[0].said


def test_the_kernels_of_this_machine_are_right() -> None:
    report = run_trial(KERNELS, Substrate.POSIX)
    assert report.fault == ""
    assert any(step.name == "bfloat16 x 128: decode" for step in report.steps)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a GPU")
def test_a_gpu_that_is_not_there_is_a_result() -> None:
    report = run_trial(SUBSTRATE, Substrate.SPARSE)
    assert "exit code 1" in report.fault
    assert "gpu" in report.fault


def test_the_parent_loads_neither_mlx_nor_the_extension() -> None:
    assert (
        output_of("""
        import sys
        import kvcache.canary.run, kvcache.canary.stamp, kvcache.substrates, kvcache.substrates
        print({"mlx.core", "metal_ext"} & set(sys.modules))
    """)
        == "set()"
    )
