import pytest

from kvcache.backend import PageBackend, Segment, StateMemory
from kvcache.counting import CountingBackend, CountingStates
from kvcache.layout import Group, KVFormat, KVShape, KVSpec, paged_layout
from kvcache.slot_pool import StateSegment

SHAPE = KVShape.uniform(2, KVSpec(2, 32, KVFormat.FLOAT32))


@pytest.fixture
def group() -> Group:
    return paged_layout(
        SHAPE, max_tokens=1600, heap_bytes=64 * 1024, system_page_bytes=4096, page_bytes=4096
    ).groups[0]


def test_a_block_is_committed_from_its_mapping_to_its_release(group: Group) -> None:
    backend = CountingBackend(group)
    counted: PageBackend = backend
    assert counted.add_heap()
    assert counted.add_buffer()
    assert counted.map(0, 0, 0, 0, 3, True)
    assert backend.committed_bytes() == 3 * group.block_bytes
    ticket = backend.unmap(0, 0, 3)
    assert backend.completed_ticket() == ticket
    assert backend.wait(ticket, 0.0)
    assert backend.committed_bytes() == 3 * group.block_bytes, "unmapping frees nothing"
    backend.release(0, 1, 2)
    assert backend.committed_bytes() == group.block_bytes


def test_a_shared_block_is_committed_once(group: Group) -> None:
    backend = CountingBackend(group)
    backend.map(0, 0, 0, 0, 2, True)
    backend.map(1, 0, 0, 0, 2, False)
    assert backend.committed_bytes() == 2 * group.block_bytes


def test_memory_comes_with_the_mapping_at_any_time(group: Group) -> None:
    backend = CountingBackend(group)
    assert backend.commit_heap(0)
    backend.finish_mappings()
    assert backend.maps_while_running
    assert backend.committed_bytes() == 0


def test_what_is_mapped_ahead_is_done_at_once(group: Group) -> None:
    backend = CountingBackend(group)
    ticket = backend.map_ahead(0, 0, 0, 0, 2)
    assert backend.completed_ticket() == ticket > 0
    assert not backend.refused(ticket)
    assert backend.committed_bytes() == 2 * group.block_bytes


def test_copied_bytes_are_counted(group: Group) -> None:
    backend = CountingBackend(group)
    backend.copy_block(0, 3, 1, 3, 5)
    assert backend.copied_bytes == 5 * SHAPE.bytes_per_token


def test_rows_stand_for_themselves(group: Group) -> None:
    backend = CountingBackend(group)
    segment = Segment(0, 0, 1)
    assert tuple(backend.rows([segment])) == (segment,)  # type: ignore[arg-type]


def test_there_is_nothing_to_shut_down(group: Group) -> None:
    assert CountingBackend(group).shut_down()


def test_a_slot_is_committed_from_its_first_write_to_its_release(group: Group) -> None:
    states = CountingStates(num_slots=4, slot_bytes=1000)
    counted: StateMemory = states
    step = CountingBackend(group).rows([Segment(0, 0, 1)])
    assert counted.num_slots == 4
    segments = [StateSegment(5, None, ((3, 1), (5, 2))), StateSegment(1, 2, ((1, 2),))]
    counted.rows(segments, step)
    assert states.committed_bytes(range(4)) == 2000
    counted.release([1, 3])
    assert states.committed_bytes(range(4)) == states.committed_bytes([2]) == 1000
