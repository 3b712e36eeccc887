"""Mappings that change while commands run, on the CPU's own pages; and what must be noticed."""

from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from kvcache.canary import stress
from kvcache.canary.report import Step
from kvcache.canary.stress import StressTrial
from kvcache.canary.trial import attempt
from kvcache.native_backends import PosixBackend
from tests.kvcache.canary.backends import LAYOUT, Liar, RowsLiar

ROUNDS = 5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "LONG_S", 0.01)


def backend(**lies: Any) -> Any:
    return Liar(PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1)), **lies)


def tried(its: Any) -> list[Step]:
    return attempt(StressTrial(its, LAYOUT, ROUNDS).actions(), lambda _: None)


def test_pages_that_keep_their_promises_pass_every_round() -> None:
    steps = tried(backend())
    assert all(step.passed for step in steps), steps[-1]
    assert [step.name for step in steps] == ["make", *(f"round {n}" for n in range(1, 6)), "end"]
    assert steps[-1].figures["rounds"] == ROUNDS
    assert steps[-1].figures["overlapped"] > 0
    assert steps[-2].figures["ran_s"] >= steps[-2].figures["mapped_s"] > 0


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
    assert "rows of region 0 are wrong" in step.said


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
    assert "attention differs by 1" in step.said


def test_a_mapping_ahead_that_is_refused_and_an_end_without_an_answer_are_noticed() -> None:
    assert "refuses a mapping" in tried(backend(refused=lambda _: True))[-1].said
    assert "did not answer" in tried(backend(shut_down=lambda: False))[-1].said
    assert "refuses a heap" in tried(backend(add_buffer=lambda: False))[-1].said
