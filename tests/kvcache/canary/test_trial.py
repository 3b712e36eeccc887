"""A substrate that works passes; one that breaks a promise fails in the step that asks for it."""

from typing import Any

import mlx.core as mx
import pytest

from kvcache.canary import trial
from kvcache.canary.report import Step
from kvcache.canary.trial import Finding, SubstrateTrial, attempt, small_layout
from kvcache.layout import METAL_PAGES
from kvcache.metal_backend import metal_backend
from kvcache.substrates import Substrate
from tests.kvcache.canary.backends import LAYOUT, posix, with_wrong
from tests.kvcache.metal_double import Device, install


def tried(backend: Any) -> list[Step]:
    return attempt(SubstrateTrial(backend, LAYOUT).actions(), lambda _: None)


def fault(backend: Any) -> tuple[str, str]:
    """The step that failed, and what it said."""
    steps = tried(backend)
    assert all(step.passed for step in steps[:-1])
    assert not steps[-1].passed, "it was not noticed"
    return steps[-1].name, steps[-1].said


def test_actions_are_told_of_and_end_with_the_first_that_fails() -> None:
    def fail() -> Finding:
        raise ValueError("no luck")

    begun: list[str] = []
    actions = [("one", lambda: Finding("fine", {"n": 1})), ("two", fail), ("three", fail)]
    steps = attempt(actions, begun.append)
    assert begun == ["one", "two"]
    assert [(s.name, s.passed, s.said) for s in steps] == [
        ("one", True, "fine"),
        ("two", False, "ValueError: no luck"),
    ]


def test_a_substrate_that_works_passes_every_step() -> None:
    steps = tried(posix())
    assert all(step.passed for step in steps), steps[-1]
    assert [step.name for step in steps][-1] == "end"
    (release,) = [step for step in steps if step.name == "release"]
    assert release.figures["returned"] >= 0.9 * release.figures["heap"]


@pytest.mark.parametrize("substrate", [Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE])
@pytest.mark.parametrize("release_heaps", [False, True])
def test_a_metal_device_passes_too(
    monkeypatch: pytest.MonkeyPatch, substrate: Substrate, release_heaps: bool
) -> None:
    device = install(monkeypatch)
    monkeypatch.setattr(trial, "process_footprint", lambda: footprint(device))
    layout = small_layout(
        substrate, trial.SHAPE, max_tokens=trial.MAX_TOKENS, system_page_bytes=4096
    )
    assert layout.groups[0].page_bytes in METAL_PAGES
    backend = metal_backend(
        substrate.setting, layout.groups[0], max_buffers=2, release_heaps=release_heaps
    )
    steps = attempt(SubstrateTrial(backend, layout).actions(), lambda _: None)
    assert all(step.passed for step in steps), steps[-1]
    said = {step.name: step.said for step in steps}
    assert "zeros" in said["map"]
    assert ("share" in said) == (not substrate.is_dense)
    assert ("release" in said) == (release_heaps and not substrate.is_dense)
    assert device.substrates[0].ended


def footprint(device: Device) -> int:
    """What the process would be charged for its heaps."""
    return sum(heap.committed_bytes for heap in device.substrates[0].heaps)


# --- what a trial must notice -------------------------------------------------------------------


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
    assert fault(posix(wait=lambda *_: False)) == (
        "unmap",
        "NotAsPromisedError: it took over 20 s",
    )


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
