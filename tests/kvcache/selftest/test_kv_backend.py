"""A backend that works passes; one that breaks a promise fails in the result that asks for it."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from kvcache.backends.choice import KVBackend
from kvcache.backends.metal import MetalBackend
from kvcache.backends.posix import PosixBackend
from kvcache.layout import METAL_PAGES, KVShape, KVSpec
from kvcache.selftest import kv_backend as pages
from kvcache.selftest.kv_backend import (
    QUERIES_PER_HEAD,
    KVBackendChecks,
    RealSizeChecks,
    run_checks,
    small_layout,
)
from kvcache.selftest.run import Result
from tests.kvcache.metal_double import Device, install
from tests.kvcache.selftest.backends import LAYOUT, Liar, posix, with_wrong


def tried(backend: Any) -> list[Result]:
    return run_checks(KVBackendChecks(backend, LAYOUT).checks(), lambda _: None)


def fault(backend: Any) -> tuple[str, str]:
    """The result that failed, and what it said."""
    results = tried(backend)
    assert all(result.passed for result in results[:-1])
    assert not results[-1].passed, "it was not noticed"
    return results[-1].name, results[-1].text


def test_checks_are_told_of_and_end_with_the_first_that_fails() -> None:
    def fail() -> Result:
        raise ValueError("no luck")

    begun: list[str] = []
    checks = [("one", lambda: Result("fine", {"n": 1})), ("two", fail), ("three", fail)]
    results = run_checks(checks, begun.append)
    assert begun == ["one", "two"]
    assert [(s.name, s.passed, s.text) for s in results] == [
        ("one", True, "fine"),
        ("two", False, "ValueError: no luck"),
    ]


def test_a_kv_backend_that_works_passes_every_step() -> None:
    results = tried(posix())
    assert all(result.passed for result in results), results[-1]
    assert [result.name for result in results][-1] == "end"
    (release,) = [result for result in results if result.name == "release"]
    assert release.figures["returned"] >= 0.9 * release.figures["heap"]


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE])
@pytest.mark.parametrize("release_heaps", [False, True])
def test_a_metal_device_passes_too(
    monkeypatch: pytest.MonkeyPatch, kv_backend: KVBackend, release_heaps: bool
) -> None:
    device = install(monkeypatch)
    monkeypatch.setattr(pages, "process_footprint", lambda: footprint(device))
    layout = small_layout(
        kv_backend, pages.SHAPE, max_tokens=pages.MAX_TOKENS, system_page_bytes=4096
    )
    assert layout.groups[0].page_bytes in METAL_PAGES
    backend = MetalBackend(
        kv_backend.setting, layout.groups[0], max_buffers=2, release_heaps=release_heaps
    )
    results = run_checks(KVBackendChecks(backend, layout).checks(), lambda _: None)
    assert all(result.passed for result in results), results[-1]
    said = {result.name: result.text for result in results}
    assert "zeros" in said["map"]
    assert ("share" in said) == (not kv_backend.is_dense)
    assert ("release" in said) == (release_heaps and not kv_backend.is_dense)
    assert device.kv_backends[0].ended


def footprint(device: Device) -> int:
    """What the process would be charged for its heaps."""
    return sum(heap.committed_bytes for heap in device.kv_backends[0].heaps)


# --- what the checks must notice ------------------------------------------------------------------


def test_a_system_without_memory_is_named() -> None:
    assert fault(posix(add_heap=lambda: False))[0] == "make"
    assert fault(posix(map=lambda *_, **__: False)) == (
        "map",
        "NotAsPromisedError: the system refuses a mapping",
    )


def test_a_fresh_block_that_should_hold_zeros_and_does_not_is_noticed() -> None:
    name, said = fault(posix(zeroes_blocks=True))
    assert name == "map again", "the first time the system's own pages are zero"
    assert "of a fresh block is not zero" in said


def test_attention_that_is_off_is_noticed() -> None:
    for operation in ("decode_attention", "chunk_attention"):
        name, said = fault(with_wrong(operation, lambda out: out + 0.03))
        assert name == "write"
        assert "attention differs by 3" in said


def test_one_wrong_row_is_noticed() -> None:
    def lose_a_row(region: mx.array) -> mx.array:
        rows = mx.arange(region.shape[0])[:, None, None]
        return mx.where(rows == region.shape[0] - 2, mx.zeros_like(region), region)

    name, said = fault(with_wrong("region", lose_a_row))
    assert name == "read"
    assert "1 rows of region 0 are wrong" in said


def test_a_second_mapping_that_shows_something_else_is_noticed() -> None:
    backend = posix()

    def elsewhere(
        buffer: int, block: int, heap: int, place: int, count: int, writable: bool
    ) -> bool:
        place += 0 if writable else 1
        return bool(backend._backend.map(buffer, block, heap, place, count, writable))

    name, said = fault(posix_with(backend, map=elsewhere))
    assert name == "share"
    assert "rows of region 0 are wrong" in said


def test_a_copy_that_does_nothing_is_noticed() -> None:
    name, _ = fault(posix(copy_block=lambda *_, **__: None))
    assert name == "copy"


def test_an_unmapping_that_takes_more_than_it_should_is_noticed() -> None:
    backend = posix()

    def both(buffer: int, block: int, count: int) -> int:
        if buffer == 0:
            backend._backend.unmap(1, 0, 2)
        return int(backend._backend.unmap(buffer, block, count))

    assert fault(posix_with(backend, unmap=both))[0] == "read the other"


def test_an_operation_that_never_completes_is_noticed() -> None:
    assert fault(posix(wait=lambda *_: False)) == ("unmap", "NotAsPromisedError: it took over 20 s")


def test_a_heap_that_stays_is_noticed() -> None:
    name, said = fault(posix(release=lambda *_: 0))
    assert name == "release"
    assert "came back" in said


def test_a_heap_that_cannot_be_mapped_whole_is_noticed() -> None:
    name, said = fault(posix(refused=lambda _: True))
    assert (name, said) == ("release", "NotAsPromisedError: the system refuses a mapping")


def test_an_end_without_an_answer_is_noticed() -> None:
    assert fault(posix(shut_down=lambda: False)) == (
        "end",
        "NotAsPromisedError: the device did not answer",
    )


def posix_with(backend: Any, **lies: Any) -> Any:
    """The same backend with further lies."""
    backend._lies.update(lies)
    return backend


def test_numbers_are_those_of_eight_bits_and_queries_are_keys_up_to_their_own() -> None:
    pattern = KVBackendChecks(posix(), LAYOUT, 10)
    assert pattern.written.shape == (4, 10, 2, 64)
    assert (pattern.written * 64 == np.round(pattern.written * 64)).all()
    queries = pattern.queries(1, 4, 3)
    assert queries.shape == (3, 2 * QUERIES_PER_HEAD, 64)
    for row, position in enumerate(range(4, 7)):
        for head in range(2 * QUERIES_PER_HEAD):
            past = pattern.written[2][: position + 1, head // QUERIES_PER_HEAD]
            assert (past == queries[row, head]).all(axis=1).any()


BUFFERS = 8
# Heaps of three blocks, and buffers of seventeen.
REAL_LAYOUT = small_layout(
    KVBackend.POSIX,
    KVShape.uniform(3, KVSpec(4, 64)),
    max_tokens=136,
    system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
    page_bytes=4096,
    heap_bytes=3 * 6 * 4096,
)


def opened(**lies: Any) -> list[Result]:
    backend: Any = Liar(PosixBackend(REAL_LAYOUT.groups[0], metal_ext.CpuWorkers(1)), **lies)
    return run_checks(RealSizeChecks(backend, REAL_LAYOUT, BUFFERS).checks(), lambda _: None)


def test_all_addresses_and_the_last_block_are_tried() -> None:
    made, last, end = opened()
    assert made.text == f"8 of 8 buffers of {17 * 6 * 4096} bytes of addresses"
    assert made.figures == {"buffers": 8, "buffer_bytes": 17 * 6 * 4096}
    assert (last.passed, last.text) == (True, "block 16: 8 rows of every region are right")
    assert (end.name, end.passed) == ("real end", True)


@pytest.mark.parametrize(("granted", "passes"), [(2, False), (3, True)])
def test_buffers_beyond_three_may_be_refused(granted: int, passes: bool) -> None:
    real = PosixBackend(REAL_LAYOUT.groups[0], metal_ext.CpuWorkers(1))
    left = [True] * granted
    backend: Any = Liar(real, add_buffer=lambda: bool(left) and left.pop() and real.add_buffer())
    results = run_checks(RealSizeChecks(backend, REAL_LAYOUT, BUFFERS).checks(), lambda _: None)
    assert results[-1].passed == passes
    said = f"{granted} of 8 buffers" if passes else f"only {granted} buffers can be made"
    assert said in results[0].text


def test_a_last_block_that_does_not_hold_what_was_written_is_noticed() -> None:
    step = opened(copy_block=lambda *_, **__: None)[-1]
    assert (step.name, step.passed) == ("last block", False)
    assert "rows of region 0 are wrong" in step.text


def test_a_refusal_of_the_real_size_and_no_end_are_noticed() -> None:
    assert "refuses a mapping" in opened(map=lambda *_, **__: False)[-1].text
    assert "did not answer" in opened(shut_down=lambda: False)[-1].text
