"""The child's side of a trial, in this process."""

import os
import runpy
import sys

import mlx.core as mx
import pytest

from kvcache.canary import __main__ as pace
from kvcache.canary import stress, trial
from kvcache.canary.__main__ import main, run_task
from kvcache.canary.report import from_line
from kvcache.canary.run import BEGINS, KERNELS, PACE, RELEASE, STRESS, SUBSTRATE, CacheSize
from kvcache.layout import KVSpec
from kvcache.substrates import Substrate
from tests.kvcache.metal_double import install


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that a process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(mx, "set_default_device", lambda _: None)
    return codes


def test_a_task_ends_with_one_line_and_no_cleaning_up(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    main([SUBSTRATE, "POSIX", "16384"])
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    steps = from_line(line)
    assert all(step.passed for step in steps)
    assert steps[0].said == "pages of 16384 bytes"
    assert said.err.splitlines() == [f"{BEGINS}{step.name}" for step in steps]
    assert ended == [0]


def test_it_is_a_program(
    ended: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["canary", SUBSTRATE, "POSIX"])
    monkeypatch.delitem(sys.modules, "kvcache.canary.__main__")
    runpy.run_module("kvcache.canary", run_name="__main__")
    assert from_line(capsys.readouterr().out.splitlines()[-1])[-1].name == "multiply 64"
    assert ended == [0]


def test_heaps_are_released_only_where_that_is_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(monkeypatch)
    monkeypatch.setattr(
        trial,
        "process_footprint",
        lambda: sum(heap.committed_bytes for heap in device.substrates[-1].heaps),
    )
    names = [step.name for step in run_task(SUBSTRATE, Substrate.SPARSE, None)]
    assert "release" not in names
    assert names[-4:] == ["end", "multiply 1", "multiply 8", "multiply 64"]
    steps = run_task(RELEASE, Substrate.SPARSE, None)
    assert all(step.passed for step in steps), steps[-1]
    assert steps[2].name == "round 1"


def test_a_real_cache_is_tried_behind_the_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    size = CacheSize(2, KVSpec(2, 64), max_tokens=4096, heap_bytes=1 << 20, buffers=5)
    steps = run_task(SUBSTRATE, Substrate.SPARSE, 16384, size)
    assert all(step.passed for step in steps), steps[-1]
    assert [step.name for step in steps][-4:] == ["open", "real buffers", "last block", "real end"]
    assert steps[-3].figures["buffers"] == 5


def test_a_substrate_that_cannot_be_opened_is_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = install(monkeypatch)
    device.said["missing_for_paged"] = ["no residency sets"]
    (step,) = run_task(SUBSTRATE, Substrate.PAGED, None)
    assert (step.name, step.passed) == ("open", False)
    assert "no residency sets" in step.said
    (step,) = run_task(KERNELS, Substrate.PAGED, None)
    assert (step.name, step.passed) == ("bfloat16 x 64: open", False)


def test_commands_are_stressed_and_timed_where_that_is_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stress, "LONG_S", 0.001)
    steps = run_task(STRESS, Substrate.POSIX, None)
    assert all(step.passed for step in steps), steps[-1]
    assert steps[-2].name == f"round {stress.ROUNDS}"
    monkeypatch.setattr(pace, "SIZE", 64)
    monkeypatch.setattr(pace, "PAUSE_S", 0.01)
    assert [step.name for step in run_task(PACE, Substrate.POSIX, None)] == ["pause", "submit"]


def test_all_kernels_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    steps = run_task(KERNELS, Substrate.SPARSE, None)
    assert all(step.passed for step in steps), steps[-1]
    assert {step.name.partition(":")[0] for step in steps} == {
        f"{kind} x {width}"
        for kind in ("bfloat16", "float16", "float32")
        for width in (64, 128, 256)
    }
