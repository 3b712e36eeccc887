from typing import Any

from kvcache.backend import Releases
from kvcache.canary.release import ROUNDS, ReleaseTrial
from kvcache.canary.report import Step
from kvcache.canary.trial import attempt
from tests.kvcache.canary.backends import LAYOUT, posix


def tried(backend: Any) -> list[Step]:
    return attempt(ReleaseTrial(backend, LAYOUT).actions(), lambda _: None)


def test_a_heap_comes_and_goes_while_another_is_used() -> None:
    steps = tried(posix())
    assert all(step.passed for step in steps), steps[-1]
    assert [step.name for step in steps] == [
        "make",
        *(f"round {number}" for number in range(1, ROUNDS + 1)),
        "end",
    ]


def test_a_substrate_that_keeps_its_heaps_is_not_tried() -> None:
    (step,) = tried(posix(releases=Releases.NOTHING))
    assert (step.passed, step.said) == (
        False,
        "NotAsPromisedError: this substrate keeps its heaps",
    )


def test_a_heap_that_goes_only_once_is_noticed() -> None:
    backend = posix()
    released: list[int] = []

    def once(heap: int, block: int, count: int) -> int:
        released.append(heap)
        return int(backend._backend.release(heap, block, count)) if len(released) == 1 else 0

    backend._lies.update(release=once)
    steps = tried(backend)
    assert [step.passed for step in steps] == [True, True, False]


def test_no_memory_and_no_end_are_noticed() -> None:
    assert not tried(posix(add_heap=lambda: False))[0].passed
    assert not tried(posix(map=lambda *_, **__: False))[0].passed
    assert not tried(posix(shut_down=lambda: False))[-1].passed
