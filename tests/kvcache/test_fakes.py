"""The fake backend must notice what it is there to notice."""

import re
from collections.abc import Callable

import pytest

from kvcache.backend import PageBackend, Segment
from kvcache.layout import Group, KVShape, paged_layout
from tests.kvcache.fakes import FakeBackend

SHAPE = KVShape(num_layers=1, kv_heads=1, head_dim=64, itemsize=4)
TOKENS = 16  # per block


def small_group() -> Group:
    return paged_layout(
        SHAPE, max_tokens=128, heap_bytes=4 * 8192, system_page_bytes=4096, page_bytes=4096
    ).group


def fake(**changes: object) -> FakeBackend:
    """Two heaps and three buffers."""
    backend = FakeBackend(small_group(), **changes)  # type: ignore[arg-type]
    for _ in range(2):
        backend.add_heap()
    for _ in range(3):
        backend.add_buffer()
    return backend


def test_it_is_a_backend() -> None:
    backend: PageBackend = fake()
    assert backend.name == "fake"


def test_a_block_stands_writable_in_one_buffer_and_read_only_in_any_number() -> None:
    backend = fake()
    assert backend.map(0, 0, 1, 2, 1, writable=True)
    assert backend.map(1, 0, 1, 2, 1, writable=False)
    assert backend.map(2, 0, 1, 1, 2, writable=False)
    assert backend.wait(backend.unmap(0, 0, 1), 0.0)
    assert backend.map(0, 0, 1, 2, 1, writable=True), "the next owner"


def mapped(backend: FakeBackend) -> None:
    backend.map(0, 0, 0, 0, 2, writable=True)


def shared(backend: FakeBackend) -> None:
    mapped(backend)
    backend.map(1, 0, 0, 0, 1, writable=False)
    backend.map(1, 1, 0, 2, 1, writable=True)


def one_of_two_unmapped(backend: FakeBackend) -> None:
    shared(backend)
    backend.unmap(0, 0, 2)


def nothing(_: FakeBackend) -> None:
    pass


# (what was done before, the mistake, what is said)
MISTAKES: dict[str, tuple[Callable[[FakeBackend], None], Callable[[FakeBackend], object], str]] = {
    "a buffer's block twice": (mapped, lambda b: b.map(0, 1, 1, 0, 1, True), "mapped twice"),
    "a second owner": (mapped, lambda b: b.map(1, 0, 0, 1, 1, True), "writable at two places"),
    "a second owner ahead": (
        mapped,
        lambda b: b.map_ahead(1, 0, 0, 1, 1),
        "writable at two places",
    ),
    "rows of read-only blocks": (shared, lambda b: b.rows([Segment(1, 0, 1)]), "read-only"),
    "rows of shared blocks": (shared, lambda b: b.rows([Segment(0, 3, 1)]), "is shared"),
    "rows without memory": (mapped, lambda b: b.rows([Segment(0, 31, 2)]), "without memory"),
    "a copy onto a read-only block": (shared, lambda b: b.copy_block(0, 1, 1, 0, 1), "read-only"),
    "a copy onto a shared block": (shared, lambda b: b.copy_block(0, 1, 0, 0, 1), "is shared"),
    "a copy from nothing": (mapped, lambda b: b.copy_block(2, 0, 0, 0, 1), "without memory"),
    "a copy to nothing": (mapped, lambda b: b.copy_block(0, 0, 2, 0, 1), "without memory"),
    "a copy of no tokens": (shared, lambda b: b.copy_block(0, 1, 1, 1, 0), "no part of a block"),
    "a copy of too many": (shared, lambda b: b.copy_block(0, 1, 1, 1, 17), "no part of a block"),
    "the release of a shared block": (
        one_of_two_unmapped,
        lambda b: b.release(0, 0, 1),
        "released while mapped",
    ),
    "unmapping nothing": (mapped, lambda b: b.unmap(0, 1, 2), "unmapped without memory"),
    "a question before its time": (
        lambda b: setattr(b, "at_once", False),
        lambda b: b.refused(b.map_ahead(0, 0, 0, 0, 1)),
        "before the ticket has completed",
    ),
    "a question about an unmap": (mapped, lambda b: b.refused(b.unmap(0, 0, 1)), "no map_ahead"),
    "a run of nothing": (nothing, lambda b: b.map(0, 0, 0, 0, 0, True), "no blocks"),
    "a buffer that was never made": (nothing, lambda b: b.map(3, 0, 0, 0, 1, True), "no such"),
    "a heap that was never made": (nothing, lambda b: b.map_ahead(0, 0, 2, 0, 1), "no such"),
    "a run beyond the heap": (nothing, lambda b: b.map(0, 0, 0, 3, 2, True), "beyond the heap"),
    "a run beyond the buffer": (nothing, lambda b: b.map_ahead(0, 7, 0, 0, 2), "beyond the buffer"),
}


@pytest.mark.parametrize(("before", "mistake", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(
    before: Callable[[FakeBackend], None], mistake: Callable[[FakeBackend], object], says: str
) -> None:
    backend = fake()
    before(backend)
    with pytest.raises(AssertionError, match=re.escape(says)):
        mistake(backend)


def test_nothing_stands_twice_where_nothing_is_shared() -> None:
    backend = fake(shares_blocks=False)
    mapped(backend)
    with pytest.raises(AssertionError, match="read-only where nothing is shared"):
        backend.map(1, 0, 1, 0, 1, writable=False)
    with pytest.raises(AssertionError, match="one block at two places"):
        backend.map(1, 0, 0, 0, 1, writable=True)


def test_a_block_that_is_mapped_ahead_is_there_when_its_ticket_has_completed() -> None:
    backend = fake(at_once=False)
    first, second = (backend.map_ahead(0, block, 0, block, 1) for block in range(2))
    rows = [Segment(0, 0, 1)]
    with pytest.raises(AssertionError, match="without memory"):
        backend.rows(rows)
    assert backend.committed_bytes() == 0
    assert backend.wait(first, 0.0)
    assert not backend.refused(first)
    assert backend.rows(rows) == rows
    with pytest.raises(AssertionError, match="without memory"):
        backend.rows([Segment(0, TOKENS, 1)])
    backend.complete()
    assert backend.completed_ticket() == second
    assert backend.rows([Segment(0, TOKENS, 1)])


def test_operations_take_effect_in_order() -> None:
    backend = fake(at_once=False)
    backend.map_ahead(0, 0, 0, 0, 1)
    backend.unmap(0, 0, 1)
    backend.release(0, 0, 1)
    backend.map_ahead(1, 0, 0, 0, 1)
    backend.complete()
    assert backend.mapped == {(1, 0): (0, 0)}


@pytest.mark.parametrize("changes", [{"fail_at": 6}, {"refuse_ahead": True}])
def test_a_refused_mapping_ahead_changes_nothing_and_is_told_once(changes: dict[str, int]) -> None:
    backend = fake(**changes)
    ticket = backend.map_ahead(0, 0, 0, 0, 1)
    assert backend.calls == 6
    assert backend.refused(ticket)
    assert backend.mapped == {}
    with pytest.raises(AssertionError, match="asked before"):
        backend.refused(ticket)


def test_copies_are_counted() -> None:
    backend = fake()
    shared(backend)
    backend.copy_block(1, 0, 1, 1, tokens=3)
    assert backend.copied_bytes == 3 * SHAPE.bytes_per_token
