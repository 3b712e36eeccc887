"""Every mistake with memory is noticed, and named."""

from array import array
from collections.abc import Callable
from random import Random
from tempfile import TemporaryFile

import pytest

from kvcache.backends.backend import PageBackend, Releases, Segment
from kvcache.layout import Group, Region
from kvcache.slots import StateSegment
from tests.kvcache.blocks import POISON, MistakeError
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import StrictStates

TOKENS = 4  # per block
REGIONS = tuple(Region(0, kind, row_bytes=4) for kind in ("keys", "values"))


def memory(**changes: object) -> StrictMemory:
    """Two heaps of three blocks, three buffers of five. Nothing completes before it is waited for.
    changes: fields."""
    group = Group(REGIONS, 16, TOKENS, blocks_per_heap=3, blocks_per_buffer=5)
    made = StrictMemory(group, at_once=False, holds_contents=True)
    for name, value in changes.items():
        setattr(made, name, value)
    for _ in range(2):
        assert made.add_heap()
    for _ in range(3):
        assert made.add_buffer()
    return made


def slots(count: int) -> "array[int]":
    return array("Q", range(1, count + 1))


def filled() -> StrictMemory:
    """Buffer 0 has a full block and a half: block 0 and 1 of heap 0, written by step 1."""
    made = memory(completed_epoch=1)
    assert made.map(0, 0, 0, 0, 2, writable=True)
    made.write(0, 0, slots(6), epoch=1, owner="a")
    return made


def test_it_is_a_backend() -> None:
    backend: PageBackend = memory()
    assert backend.name == "strict"


def test_what_was_written_is_read_through_the_page_map() -> None:
    made = filled()
    assert [(block.place, part) for block, part in made.read(0, 6)] == [
        (0, slots(4).tobytes()),
        (1, array("Q", [5, 6]).tobytes()),
    ]
    assert made.slot(0, 5) == 6


def test_a_sealed_block_is_shared_and_a_partial_one_copied() -> None:
    made = filled()
    assert made.map(1, 0, 0, 0, 1, writable=False)
    assert made.map(1, 1, 1, 0, 1, writable=True)
    made.copy_block(0, 1, 1, 1, 2)
    assert (made.copies, made.copied_bytes) == (1, 2 * made.group.bytes_per_token)
    made.write(1, 6, slots(1), epoch=2, owner="a")
    assert [part for _, part in made.read(0, 6)] == [part for _, part in made.read(1, 6)]
    assert made.slot(1, 6) == 1


def test_blocks_come_and_go_with_their_tickets() -> None:
    made = memory()
    coming = made.map_ahead(0, 0, 0, 0, 1)
    with pytest.raises(MistakeError, match="block 0 of buffer 0 is not mapped yet"):
        made.read(0, 1)
    assert made.mapped == {}
    assert made.committed_bytes() == 0
    assert made.wait(coming, 1.0)
    assert not made.refused(coming)
    assert made.mapped == {(0, 0): (0, 0)}
    made.write(0, 0, slots(1), 1, "a")
    going = made.unmap(0, 0, 1)
    with pytest.raises(MistakeError, match="block 0 of buffer 0 is being unmapped"):
        made.read(0, 1)
    assert made.completed_ticket() < going
    made.slowness = 0.0
    assert made.completed_ticket() == going
    assert not made.mappings
    assert made.committed_bytes() == made.group.block_bytes
    made.release(0, 0, 3)
    assert made.completed_ticket() == going + 1
    assert made.committed_bytes() == 0


def test_operations_are_done_at_once_or_when_they_are_completed() -> None:
    made = memory(at_once=True)
    ticket = made.map_ahead(0, 0, 0, 0, 1)
    assert made.completed_ticket() == ticket
    assert not made.refused(ticket)
    assert made.rows([Segment(0, 0, 1)]) == [Segment(0, 0, 1)]
    made.at_once = False
    made.unmap(0, 0, 1)
    assert made.map_ahead(1, 0, 1, 0, 1) == 3
    made.complete()
    assert made.completed_ticket() == 3
    assert made.mapped == {(1, 0): (1, 0)}


def test_refusals_change_nothing() -> None:
    made = memory()
    made.faults = MemoryFaults(Random(0), rate=1.0, left=4)
    assert not made.add_heap()
    assert not made.add_buffer()
    assert not made.map(0, 0, 0, 0, 1, writable=True)
    ticket = made.map_ahead(0, 0, 0, 0, 1)
    assert made.wait(ticket, 1.0)
    assert made.refused(ticket)
    assert not made.mappings
    assert made.faults.refused == 4
    assert made.add_heap(), "the system refuses no more"
    made.faults = MemoryFaults(Random(0), stuck_rate=1.0)
    assert not made.wait(made.map_ahead(0, 0, 0, 0, 1), 1.0)


def test_the_call_of_a_number_is_refused_and_no_other() -> None:
    made = memory(at_once=True, faults=MemoryFaults(fail_at=7))
    assert made.map(0, 0, 0, 0, 1, writable=True)
    assert made.refused(made.map_ahead(0, 1, 0, 1, 1))
    assert made.mapped == {(0, 0): (0, 0)}
    assert made.committed_bytes() == made.group.block_bytes, "a refusal takes no memory"
    assert not made.refused(made.map_ahead(0, 1, 0, 1, 1))
    assert (made.faults.calls, made.faults.refused) == (8, 1)
    made.faults.refuse_ahead = True
    assert made.refused(made.map_ahead(0, 2, 0, 2, 1))


def test_a_block_that_was_refused_ahead_can_be_given_back_unasked() -> None:
    made = memory()
    made.faults = MemoryFaults(Random(0), rate=1.0, left=1)
    made.map_ahead(0, 0, 0, 0, 1)
    assert made.wait(made.unmap(0, 0, 1), 1.0)
    assert not made.mappings


def unmapping(made: StrictMemory) -> None:
    made.unmap(0, 0, 2)


def releasing(made: StrictMemory) -> None:
    assert made.wait(made.unmap(0, 0, 2), 1.0)
    made.release(0, 0, 3)


def sharing(made: StrictMemory) -> None:
    assert made.map(1, 0, 0, 0, 1, writable=False)


def nothing(made: StrictMemory) -> None:
    pass


Action = Callable[[StrictMemory], object]


@pytest.mark.parametrize(
    ("before", "mistake", "message"),
    [
        (nothing, lambda m: m.map(0, 1, 1, 0, 1, True), "block 1 of buffer 0 is mapped and is map"),
        (unmapping, lambda m: m.map(0, 0, 1, 0, 1, True), "is being unmapped and is mapped over"),
        (nothing, lambda m: m.map(1, 0, 0, 1, 1, True), "becomes writable while it is mapped"),
        (unmapping, lambda m: m.map_ahead(1, 0, 0, 1, 1), "becomes writable while it is mapped"),
        (nothing, lambda m: m.map(1, 0, 0, 1, 1, False), "block 1 of heap 0 is shared and is not"),
        (releasing, lambda m: m.map(1, 0, 0, 0, 1, True), "mapped while its memory goes back"),
        (releasing, lambda m: m.release(0, 0, 3), "block 0 of heap 0 is released twice"),
        (nothing, lambda m: m.release(0, 0, 3), "block 0 of heap 0 is released while it is mapped"),
        (unmapping, lambda m: m.release(0, 0, 3), "is released while it is mapped"),
        (unmapping, lambda m: m.unmap(0, 1, 1), "block 1 of buffer 0 is unmapped twice"),
        (nothing, lambda m: m.unmap(0, 2, 1), "block 2 of buffer 0 is not mapped"),
        (nothing, lambda m: m.read(0, 9), "block 2 of buffer 0 is not mapped"),
        (nothing, lambda m: m.write(0, 5, slots(1), 2, "a"), "written twice from slot 1"),
        (sharing, lambda m: m.write(1, 0, slots(1), 2, "a"), "block 0 of buffer 1 may only be re"),
        (sharing, lambda m: m.write(0, 0, slots(1), 2, "a"), "written while others have it"),
        (sharing, lambda m: m.copy_block(0, 1, 1, 0, 1), "block 0 of buffer 1 may only be read"),
        (nothing, lambda m: m.copy_block(0, 1, 0, 0, 3), "copied beyond what it holds"),
        (nothing, lambda m: m.copy_block(0, 0, 0, 1, 5), "copied beyond what it holds"),
        (nothing, lambda m: m.copy_block(0, 0, 0, 1, 0), "copied beyond what it holds"),
        (nothing, lambda m: m.copy_block(2, 0, 0, 1, 1), "block 0 of buffer 2 is not mapped"),
        (nothing, lambda m: m.copy_block(0, 0, 2, 0, 1), "block 0 of buffer 2 is not mapped"),
        (sharing, lambda m: m.copy_block(0, 1, 0, 0, 1), "written while others have it mapped"),
        (sharing, lambda m: m.rows([Segment(1, 3, 1)]), "block 0 of buffer 1 may only be read"),
        (sharing, lambda m: m.rows([Segment(0, 3, 1)]), "written while others have it mapped"),
        (nothing, lambda m: m.rows([Segment(0, 7, 2)]), "block 2 of buffer 0 is not mapped"),
        (nothing, lambda m: m.rows([Segment(1, 4, 1)]), "block 0 of buffer 1 is not mapped"),
        (nothing, lambda m: m.map(1, 0, 0, 0, 0, True), "heap 0 has no blocks 0 to 0"),
        (nothing, lambda m: m.map(0, 4, 1, 0, 2, True), "buffer 0 has no blocks 4 to 6"),
        (nothing, lambda m: m.map(3, 0, 1, 0, 1, True), "there is no buffer 3"),
        (nothing, lambda m: m.map(1, 0, 1, 2, 2, True), "heap 1 has no blocks 2 to 4"),
        (nothing, lambda m: m.map(1, 0, 2, 0, 1, True), "there is no heap 2"),
        (nothing, lambda m: m.wait(1, 1.0), "ticket 1 was never issued"),
        (nothing, lambda m: m.refused(m.map_ahead(1, 0, 1, 0, 1)), "ticket 1 is not known yet"),
        (unmapping, lambda m: m.wait(1, 1.0) and m.refused(1), "ticket 1 maps nothing"),
    ],
)
def test_a_mistake_is_noticed_and_named(before: Action, mistake: Action, message: str) -> None:
    made = filled()
    before(made)
    with pytest.raises(MistakeError, match=message):
        mistake(made)


@pytest.mark.parametrize(
    ("limit", "mistake", "message"),
    [
        ({"completed_epoch": 0}, sharing, "shared before step 1 has written it"),
        ({"shares_blocks": False}, sharing, "is shared, and this memory cannot"),
        ({"max_sharers": 1}, sharing, "more than 1 mappings"),
        ({"releases": Releases.NOTHING}, lambda m: m.release(1, 0, 4), "memory that is kept"),
        ({"releases": Releases.HEAPS}, lambda m: m.release(1, 0, 1), "are no whole heap"),
        ({"heap_limit": 2}, lambda m: m.add_heap(), "heap 2 is beyond the limit of 2"),
        ({"mapping_limit": 5}, lambda m: m.map(1, 0, 1, 0, 1, True), "4 runs are more than 5"),
        ({"mapping_limit": 5}, lambda m: m.map_ahead(0, 2, 1, 0, 1), "3 runs are more than 5"),
    ],
)
def test_a_limit_is_a_limit(limit: dict[str, object], mistake: Action, message: str) -> None:
    made = filled()
    for name, value in limit.items():
        setattr(made, name, value)
    with pytest.raises(MistakeError, match=message):
        mistake(made)


def test_a_block_that_continues_a_run_costs_no_mapping() -> None:
    made = filled()
    made.mapping_limit = 4
    assert made.map(0, 2, 0, 2, 1, writable=True)


def test_what_changes_hands_is_forgotten() -> None:
    made = filled()
    assert made.wait(made.unmap(0, 0, 2), 1.0)
    assert made.map(1, 0, 0, 0, 1, writable=True)
    assert made.slot(1, 0) == POISON


def test_what_nobody_writes_may_be_shared_and_copied() -> None:
    made = memory(holds_contents=False)
    assert made.map(0, 0, 0, 0, 2, writable=True)
    assert made.map(1, 0, 0, 0, 1, writable=False)
    made.copy_block(1, 0, 0, 1, TOKENS)
    with pytest.raises(MistakeError, match="copied beyond what it holds"):
        made.copy_block(1, 0, 0, 1, TOKENS + 1)


def test_a_full_block_passes_through_a_file_and_no_other() -> None:
    made = filled()
    assert made.map(1, 0, 1, 0, 1, writable=True)
    with TemporaryFile() as file:
        fd = file.fileno()
        with pytest.raises(MistakeError, match="block 1 of heap 0 is written to a file and is not"):
            made.write_block(0, 1, fd, 0)
        total = made.write_block(0, 0, fd, 64)
        with pytest.raises(OSError, match="the file ends before the record"):
            made.read_block(1, 0, fd, 96)
        assert made.slot(1, 0) == POISON
        assert made.read_block(1, 0, fd, 64) == total
        assert made.read(1, TOKENS)[0][1] == slots(4).tobytes()
        assert made.map(2, 0, 1, 0, 1, writable=False)
        with pytest.raises(MistakeError, match="block 0 of buffer 2 may only be read"):
            made.read_block(2, 0, fd, 64)


def test_a_slot_passes_through_a_file_when_no_step_uses_it() -> None:
    states = StrictStates(3)
    segment = StateSegment(2, None, ((2, 1),))
    assert states.commit(1)
    with TemporaryFile() as file:
        fd = file.fileno()
        states.advance(segment, 0, life=1, epoch=1, after=int)
        with pytest.raises(MistakeError, match="slot 1 is moved beside"):
            states.write_record(1, fd, 0)
        states.completed_epoch = 1
        total = states.write_record(1, fd, 0)
        with pytest.raises(MistakeError, match="slot 2 has no memory"):
            states.read_record(2, fd, 0)
        assert states.commit(2)
        states.wrong = {1, 2}
        with pytest.raises(MistakeError, match="slot 1 goes to a file, and is wrong"):
            states.write_record(1, fd, 0)
        assert states.read_record(2, fd, 0) == total
        assert states.wrong == {1}
    states.advance(StateSegment(1, 2, ((1, 2),)), 2, life=2, epoch=2, after=lambda rows: rows + 2)
