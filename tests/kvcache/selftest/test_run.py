"""Whatever a self-test's process does, its parent gets a report."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.backends.choice import KVBackend
from kvcache.selftest import run
from kvcache.selftest.machine import this_machine
from kvcache.selftest.run import (
    USUAL,
    CacheSize,
    Result,
    SelfTest,
    SelfTestReport,
    from_line,
    has_passed,
    run_program,
    run_selftest,
    to_line,
    withdraw_stamp,
    write_stamp,
)
from tests.metal_ext.programs import output_of

LIMIT_S = 60.0
BEGIN = "import sys; print('self-test begins: map', file=sys.stderr, flush=True); "


def report_of(program: str, limit_s: float = LIMIT_S) -> SelfTestReport:
    return run_program([sys.executable, "-c", program], limit_s)


def test_a_test_that_ends_well_is_read() -> None:
    line = to_line([Result("fine", name="map")])
    report = report_of(f"print('chatter'); print({line!r})")
    assert report.passed
    assert [step.name for step in report.results] == ["map"]
    assert report.seconds > 0


def test_a_step_that_failed_is_the_fault() -> None:
    line = to_line([Result("", name="map"), Result("wrong", name="read", passed=False)])
    report = report_of(f"print({line!r})")
    assert report.fault == "read: wrong"
    assert len(report.results) == 2


def test_a_crash_is_a_result_that_names_the_signal_and_the_step() -> None:
    report = report_of(BEGIN + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert report.fault == "it was ended by signal 11 (Segmentation fault), in the step 'map'"


def test_a_hang_is_a_result_and_the_process_is_ended() -> None:
    started = time.monotonic()
    # A shell has begun long before an interpreter would.
    hanging = ["sh", "-c", "echo 'self-test begins: map' >&2; exec sleep 600"]
    report = run_program(hanging, limit_s=2.0)
    assert report.fault == "it took over 2 s, in the step 'map'"
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("print('hello')", "it said what cannot be read: not a report: 'hello'"),
        ("import os; os.write(1, bytes(range(128, 256)))", "it said what cannot be read"),
        ("print('[]')", "it said what cannot be read: a report of nothing"),
        ("pass", "it said what cannot be read: not a report: ''"),
        ("raise SystemExit(3)", "it ended with exit code 3: it said nothing"),
        ("import no_such_module", "it ended with exit code 1: ModuleNotFoundError: No module"),
        (BEGIN + "raise OSError('no')", "exit code 1, in the step 'map': OSError: no"),
    ],
)
def test_garbage_and_exit_codes_are_results(program: str, fault: str) -> None:
    report = report_of(program)
    assert fault in report.fault
    assert report.results == ()
    assert not report.passed


def test_the_kv_backend_of_this_machine_passes_its_canary() -> None:
    report = run_selftest(SelfTest.KV_BACKEND, KVBackend.POSIX, 16384)
    assert report.fault == ""
    names = [step.name for step in report.results]
    assert names[0] == "open"
    assert names.index("multiply 1") == names.index("release") + 2
    assert "share" in names
    assert "16384" in report.results[0].text


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a GPU")
def test_a_gpu_that_is_not_there_is_a_result() -> None:
    report = run_selftest(SelfTest.KV_BACKEND, KVBackend.SPARSE)
    assert "exit code 1" in report.fault
    assert "gpu" in report.fault


def test_the_parent_loads_neither_mlx_nor_the_extension() -> None:
    assert (
        output_of("""
        import sys
        import kvcache.selftest.run, kvcache.backends.choice, kvcache.backends.choice
        print({"mlx.core", "metal_ext"} & set(sys.modules))
    """)
        == "set()"
    )


GOOD = Result("8 blocks", {"bytes": 7}, "map", True, 0.5)
BAD = Result("3 rows are wrong", {}, "read", False, 0.1)


def test_steps_cross_from_one_process_to_another_as_one_line() -> None:
    line = to_line([GOOD, BAD])
    assert "\n" not in line
    assert from_line(line) == (GOOD, BAD)


@pytest.mark.parametrize("line", ["", "{", "7", "null", "[3]", "[{}]", '[{"nam": 1}]'])
def test_anything_else_is_no_report(line: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        from_line(line)


def test_a_report_is_json_with_its_verdict() -> None:
    report = SelfTestReport((GOOD, BAD), "read: 3 rows are wrong", 1.5)
    json_object = json.loads(json.dumps(report.as_json()))
    assert not report.passed
    assert (json_object["passed"], json_object["seconds"]) == (False, 1.5)
    assert json_object["steps"][0] == {
        "name": "map", "passed": True, "said": "8 blocks", "seconds": 0.5, "figures": {"bytes": 7},
    }  # fmt: skip
    assert SelfTestReport((GOOD,), "", 1.0).passed


def test_a_size_crosses_a_command_line() -> None:
    assert CacheSize.from_argument(USUAL.to_argument()) == USUAL


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_has_passed_is_remembered_for_its_test_and_its_kv_backend_alone(folder: Path) -> None:
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
    path = write_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
    assert path.parent == folder / "quire"
    assert has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
    assert not has_passed(SelfTest.RELEASE, KVBackend.PAGED)
    assert not has_passed(SelfTest.STRESS, KVBackend.SPARSE)
    write_stamp(SelfTest.STRESS, KVBackend.SPARSE)
    withdraw_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
    withdraw_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
    assert has_passed(SelfTest.STRESS, KVBackend.SPARSE)


@pytest.mark.parametrize("changed", ["model", "processor", "system", "mlx"])
def test_another_machine_system_or_mlx_must_pass_again(
    folder: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
    other = replace(this_machine(), **{changed: "another"})
    monkeypatch.setattr(run, "this_machine", lambda: other)
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)


@pytest.mark.parametrize("contents", ["", "{}", "[", '{"passed": "something else"}'])
def test_a_file_that_says_something_else_is_no_stamp(folder: Path, contents: str) -> None:
    write_stamp(SelfTest.RELEASE, KVBackend.SPARSE).write_text(contents)
    assert not has_passed(SelfTest.RELEASE, KVBackend.SPARSE)
