"""The child's side of a self-test, in this process."""

import os
import runpy
import sys
from typing import Any

import mlx.core as mx
import pytest

from kvcache.backends.choice import KVBackend
from kvcache.layout import KVSpec
from kvcache.selftest import __main__ as program
from kvcache.selftest import kernels, stress
from kvcache.selftest import kv_backend as pages
from kvcache.selftest.__main__ import checks_of, main
from kvcache.selftest.kv_backend import run_checks
from kvcache.selftest.run import BEGINS, CacheSize, Result, SelfTest, from_line
from tests.kvcache.metal_double import install


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that a process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(mx, "set_default_device", lambda _: None)
    return codes


def run(*arguments: Any) -> list[Result]:
    return run_checks(checks_of(*arguments), lambda _: None)


def test_a_task_ends_with_one_line_and_no_cleaning_up(
    ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    main([SelfTest.KV_BACKEND, "POSIX", "16384"])
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    results = from_line(line)
    assert all(result.passed for result in results)
    assert results[0].text == "pages of 16384 bytes"
    assert said.err.splitlines() == [f"{BEGINS}{result.name}" for result in results]
    assert ended == [0]


def test_it_is_a_program(
    ended: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["selftest", SelfTest.KV_BACKEND, "POSIX"])
    monkeypatch.delitem(sys.modules, "kvcache.selftest.__main__")
    runpy.run_module("kvcache.selftest", run_name="__main__")
    assert from_line(capsys.readouterr().out.splitlines()[-1])[-1].name == "bfloat16 x 256: end"
    assert ended == [0]


def test_heaps_are_released_only_where_that_is_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(monkeypatch)
    monkeypatch.setattr(
        pages,
        "process_footprint",
        lambda: sum(heap.committed_bytes for heap in device.kv_backends[-1].heaps),
    )
    names = [result.name for result in run(SelfTest.KV_BACKEND, KVBackend.SPARSE, None)]
    assert "release" not in names
    assert {"multiply 64", "experts 128 in order", "bfloat16 x 256: chunk"} < set(names)
    results = run(SelfTest.RELEASE, KVBackend.SPARSE, None)
    assert all(result.passed for result in results), results[-1]
    assert results[2].name == "round 1"


def test_a_real_cache_is_tried_behind_the_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    size = CacheSize(2, KVSpec(2, 64), max_tokens=4096, heap_bytes=1 << 20, buffers=5)
    results = run(SelfTest.KV_BACKEND, KVBackend.SPARSE, 16384, size)
    assert all(result.passed for result in results), results[-1]
    assert [result.name for result in results][-4:] == [
        "open",
        "real buffers",
        "last block",
        "real end",
    ]
    assert results[-3].figures["buffers"] == 5


def test_a_kv_backend_that_cannot_be_opened_is_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = install(monkeypatch)
    device.said["missing_for_paged"] = ["no residency sets"]
    (result,) = run(SelfTest.KV_BACKEND, KVBackend.PAGED, None)
    assert (result.name, result.passed) == ("open", False)
    assert "no residency sets" in result.text
    (result,) = run(SelfTest.KERNELS, KVBackend.PAGED, None)
    assert (result.name, result.passed) == ("bfloat16 x 64: open", False)


def test_commands_are_stressed_and_timed_where_that_is_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stress, "LONG_S", 0.001)
    results = run(SelfTest.STRESS, KVBackend.POSIX, None)
    assert all(result.passed for result in results), results[-1]
    assert results[-2].name == f"round {stress.ROUNDS}"
    monkeypatch.setattr(program, "SIZE", 64)
    monkeypatch.setattr(program, "PAUSE_S", 0.01)
    pause, submit = run(SelfTest.PACE, KVBackend.POSIX, None)
    assert pause.passed
    assert submit.passed
    assert pause.figures["after_pause_s"] > 0
    assert pause.figures["pause_s"] == 0.01
    assert 0 < submit.figures["submit_s"] <= submit.figures["done_s"]


@pytest.mark.parametrize("kv_backend", KVBackend)
def test_attention_to_whole_sequences_is_timed(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    if kv_backend.on_gpu:
        install(monkeypatch)
    monkeypatch.setattr(program, "LONG_TOKENS", 512)
    monkeypatch.setattr(kernels, "READS", 2)
    monkeypatch.setattr(kernels, "TIMED_STEPS", 1)
    results = run(SelfTest.BANDWIDTH, kv_backend, None)
    assert [result.name for result in results] == ["open", "map", "1 sequences", "3 sequences"]
    for result in results[2:]:
        assert result.text == f"{result.figures['bytes_per_s'] / 1e9:.1f} GB/s"


@pytest.mark.parametrize("differs_from", [6, 100])
def test_rows_whose_bits_depend_on_their_number_are_counted(
    monkeypatch: pytest.MonkeyPatch, differs_from: int
) -> None:
    """Another kernel multiplies more rows by a large matrix, and ends in another last bit."""
    multiply: Any = mx.quantized_matmul

    def rounded(rows: mx.array, *weights: mx.array, **form: Any) -> mx.array:
        product: mx.array = multiply(rows, *weights, **form)
        other = len(rows) >= differs_from and product.shape[1] > 4096
        return product.at[0].multiply(1 + 2**-20) if other else product

    monkeypatch.setattr(mx, "quantized_matmul", rounded)
    results = run(SelfTest.EQUAL_BITS, KVBackend.POSIX, None)
    assert {result.name: result.figures["rows_with_other_bits"] for result in results} == {
        f"multiply {rows} by {outputs}": int(outputs > 4096 and rows >= differs_from)
        for outputs in (512, 8192)
        for rows in range(2, 10)
    }


def test_rows_of_quires_own_products_are_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    results = run(SelfTest.EQUAL_BITS, KVBackend.SPARSE, None)
    own = [result for result in results if result.name.startswith("quire multiplies")]
    assert len(own) == len(results) / 2
    assert not any(result.figures["rows_with_other_bits"] for result in own)


def test_all_kernels_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    results = run(SelfTest.KERNELS, KVBackend.SPARSE, None)
    assert all(result.passed for result in results), results[-1]
    assert {result.name.partition(":")[0] for result in results} == {
        f"{kind} x {width}"
        for kind in ("bfloat16", "float16", "float32")
        for width in (64, 128, 256)
    }
