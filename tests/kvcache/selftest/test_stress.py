"""Mappings that change while commands run, on the CPU's own pages; and what must be noticed."""

from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from kvcache.backends.backend import Releases
from kvcache.backends.posix import PosixBackend
from kvcache.selftest import stress
from kvcache.selftest.kv_backend import run_checks
from kvcache.selftest.run import Result
from kvcache.selftest.stress import RELEASE_ROUNDS, ReleaseChecks, StressChecks
from tests.kvcache.selftest.backends import LAYOUT, Liar, RowsLiar, posix

ROUNDS = 5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "LONG_S", 0.01)


def backend(**lies: Any) -> Any:
    return Liar(PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1)), **lies)


def tried(its: Any) -> list[Result]:
    return run_checks(StressChecks(its, LAYOUT, ROUNDS).checks(), lambda _: None)


def test_pages_that_keep_their_promises_pass_every_round() -> None:
    results = tried(backend())
    assert all(step.passed for step in results), results[-1]
    assert [step.name for step in results] == ["make", *(f"round {n}" for n in range(1, 6)), "end"]
    assert results[-1].figures["rounds"] == ROUNDS
    assert results[-1].figures["overlapped"] > 0
    assert results[-2].figures["ran_s"] >= results[-2].figures["mapped_s"] > 0


def test_an_unmapping_that_takes_the_memory_of_running_commands_is_noticed() -> None:
    its = backend()

    def other_places(
        buffer: int, block: int, heap: int, place: int, count: int, writable: bool
    ) -> bool:
        """What is mapped again for reading is not what was there."""
        again = not writable and count > 1
        return bool(its._backend.map(buffer, block, heap, place + again, count, writable))

    its._lies["map"] = other_places
    step = tried(its)[-1]
    assert (step.passed, step.name) == (False, "round 2")
    assert "rows of region 0 are wrong" in step.text


def test_one_wrong_result_among_many_is_noticed() -> None:
    calls: list[None] = []

    def once(out: mx.array) -> mx.array:
        calls.append(None)
        return out + 0.1 if len(calls) == 12 else out

    its = backend()
    real = its._backend.rows
    its._lies["rows"] = lambda segments: RowsLiar(real(segments), "decode_attention", once)
    step = tried(its)[-1]
    assert not step.passed
    assert "attention differs by 1" in step.text


def test_a_mapping_ahead_that_is_refused_and_an_end_without_an_answer_are_noticed() -> None:
    assert "refuses a mapping" in tried(backend(refused=lambda _: True))[-1].text
    assert "did not answer" in tried(backend(shut_down=lambda: False))[-1].text
    assert "refuses a heap" in tried(backend(add_buffer=lambda: False))[-1].text


def released(backend: Any) -> list[Result]:
    return run_checks(ReleaseChecks(backend, LAYOUT).checks(), lambda _: None)


def test_a_heap_comes_and_goes_while_another_is_used() -> None:
    results = released(posix())
    assert all(step.passed for step in results), results[-1]
    assert [step.name for step in results] == [
        "make",
        *(f"round {number}" for number in range(1, RELEASE_ROUNDS + 1)),
        "end",
    ]


def test_a_kv_backend_that_keeps_its_heaps_is_not_tried() -> None:
    (step,) = released(posix(releases=Releases.NOTHING))
    assert (step.passed, step.text) == (False, "NotAsPromisedError: this backend keeps its heaps")


def test_a_heap_that_goes_only_once_is_noticed() -> None:
    backend = posix()
    heaps: list[int] = []

    def once(heap: int, block: int, count: int) -> int:
        heaps.append(heap)
        return int(backend._backend.release(heap, block, count)) if len(heaps) == 1 else 0

    backend._lies.update(release=once)
    results = released(backend)
    assert [step.passed for step in results] == [True, True, False]


def test_no_memory_and_no_end_are_noticed() -> None:
    assert not released(posix(add_heap=lambda: False))[0].passed
    assert not released(posix(map=lambda *_, **__: False))[0].passed
    assert not released(posix(shut_down=lambda: False))[-1].passed
