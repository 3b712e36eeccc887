"""A cache as large as serving makes it, and what of it must be noticed."""

from typing import Any

import pytest

import metal_ext
from kvcache.canary.report import Step
from kvcache.canary.trial import RealSizeTrial, attempt, small_layout
from kvcache.layout import KVShape, KVSpec
from kvcache.native_backends import PosixBackend
from kvcache.substrates import Substrate
from tests.kvcache.canary.backends import Liar

BUFFERS = 8
# Heaps of three blocks, and buffers of seventeen.
LAYOUT = small_layout(
    Substrate.POSIX,
    KVShape.uniform(3, KVSpec(4, 64)),
    max_tokens=136,
    system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
    page_bytes=4096,
    heap_bytes=3 * 6 * 4096,
)


def tried(**lies: Any) -> list[Step]:
    backend: Any = Liar(PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1)), **lies)
    return attempt(RealSizeTrial(backend, LAYOUT, BUFFERS).actions(), lambda _: None)


def test_all_addresses_and_the_last_block_are_tried() -> None:
    made, last, end = tried()
    assert made.said == f"8 of 8 buffers of {17 * 6 * 4096} bytes of addresses"
    assert made.figures == {"buffers": 8, "buffer_bytes": 17 * 6 * 4096}
    assert (last.passed, last.said) == (True, "block 16: 8 rows of every region are right")
    assert (end.name, end.passed) == ("real end", True)


@pytest.mark.parametrize(("granted", "passes"), [(2, False), (3, True)])
def test_buffers_beyond_three_may_be_refused(granted: int, passes: bool) -> None:
    real = PosixBackend(LAYOUT.groups[0], metal_ext.CpuWorkers(1))
    left = [True] * granted
    backend: Any = Liar(real, add_buffer=lambda: bool(left) and left.pop() and real.add_buffer())
    steps = attempt(RealSizeTrial(backend, LAYOUT, BUFFERS).actions(), lambda _: None)
    assert steps[-1].passed == passes
    said = f"{granted} of 8 buffers" if passes else f"only {granted} buffers can be made"
    assert said in steps[0].said


def test_a_last_block_that_does_not_hold_what_was_written_is_noticed() -> None:
    step = tried(copy_block=lambda *_, **__: None)[-1]
    assert (step.name, step.passed) == ("last block", False)
    assert "rows of region 0 are wrong" in step.said


def test_a_refusal_and_an_end_without_an_answer_are_noticed() -> None:
    assert "refuses a mapping" in tried(map=lambda *_, **__: False)[-1].said
    assert "did not answer" in tried(shut_down=lambda: False)[-1].said
