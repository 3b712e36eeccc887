"""What `quire doctor --first-hour` measures in processes of their own, in this one."""

from typing import Any

import mlx.core as mx
import pytest

from kvcache.kv_backends import KVBackend
from kvcache.layout import KVSpec
from kvcache.selftest import __main__ as program
from kvcache.selftest import kernels
from kvcache.selftest.__main__ import checks_of
from kvcache.selftest.kv_backend import run_checks
from kvcache.selftest.run import CacheSize, Result, SelfTest
from tests.kvcache.metal_double import install

SMALL = CacheSize(1, KVSpec(2, 64), max_tokens=512, heap_bytes=256 << 10, buffers=3)


def measure(
    monkeypatch: pytest.MonkeyPatch, test: SelfTest, kv_backend: KVBackend
) -> dict[str, Result]:
    if kv_backend.on_gpu:
        install(monkeypatch)
    monkeypatch.setattr(program, "LONG_TOKENS", 512)
    monkeypatch.setattr(program, "USUAL", SMALL)
    monkeypatch.setattr(program, "kernel_specs", lambda _: [KVSpec(kernels.KV_HEADS, 64)])
    results = run_checks(checks_of(test, kv_backend, None), lambda _: None)
    assert all(result.passed for result in results), results[-1]
    return {result.name: result for result in results}


@pytest.mark.parametrize("kv_backend", KVBackend)
def test_attention_to_whole_sequences_is_timed(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    results = measure(monkeypatch, SelfTest.BANDWIDTH, kv_backend)
    assert list(results) == ["open", "map", "1 sequences", "3 sequences"]
    assert results["1 sequences"].figures["bytes_per_s"] > 0
    assert results["3 sequences"].text.endswith(" GB/s")


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.POSIX])
def test_twice_as_many_ranges_are_made_as_for_serving(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    results = measure(monkeypatch, SelfTest.RANGES, kv_backend)
    assert list(results) == ["open", "real buffers", "last block", "real end"]
    assert results["real buffers"].figures["buffers"] == 2 * SMALL.buffers


@pytest.mark.parametrize("kv_backend", KVBackend)
def test_kernels_are_timed_again_after_their_first_use(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend
) -> None:
    names = list(measure(monkeypatch, SelfTest.FIRST_USE, kv_backend))
    repeated = ["decode", "project", *(["gate"] if kv_backend.on_gpu else [])]
    again = [names[n - 1] for n, name in enumerate(names) if name.endswith(" again")]
    assert again == [f"bfloat16 x 64: {kernel}" for kernel in repeated]


@pytest.mark.parametrize("differs_from", [2, 3, 5, 6, 8, 9, 100])
def test_rows_whose_bits_depend_on_their_number_are_counted(
    monkeypatch: pytest.MonkeyPatch, differs_from: int
) -> None:
    """Another kernel multiplies more rows, and one of its rows ends in another last bit."""
    multiply: Any = mx.quantized_matmul

    def rounded(rows: mx.array, *weights: mx.array, **form: Any) -> mx.array:
        product = multiply(rows, *weights, **form)
        return product.at[0].multiply(1 + 2**-20) if len(rows) >= differs_from else product

    monkeypatch.setattr(mx, "quantized_matmul", rounded)
    results = measure(monkeypatch, SelfTest.EQUAL_BITS, KVBackend.POSIX)
    assert list(results) == [f"multiply {rows}" for rows in range(2, 10)]
    for rows, result in enumerate(results.values(), 2):
        others = int(rows >= differs_from)
        assert result.figures["rows_with_other_bits"] == others
        assert result.text.endswith(f"; {others} of {rows} rows have other bits than alone")
