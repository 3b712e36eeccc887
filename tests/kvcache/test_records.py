import pytest

from kvcache.records import (
    Block,
    BlockState,
    MappedRun,
    PageTable,
    Pending,
    SparseBuffer,
    SparseHeap,
    runs_of,
)


def table(*blocks: tuple[int, int]) -> PageTable:
    made = PageTable()
    made.append([Block(*block) for block in blocks], writable=True)
    return made


def test_consecutive_blocks_of_one_heap_are_one_mapping() -> None:
    assert table((0, 1), (0, 2), (0, 3)).runs == [MappedRun(0, 0, 1, 3, True)]


def test_a_gap_a_step_back_and_another_heap_begin_a_new_mapping() -> None:
    runs = table((0, 1), (0, 3), (0, 2), (1, 3), (1, 4)).runs
    assert [(r.block, r.heap, r.heap_block, r.count) for r in runs] == [
        (0, 0, 1, 1),
        (1, 0, 3, 1),
        (2, 0, 2, 1),
        (3, 1, 3, 2),
    ]


def test_what_is_added_is_mapped_in_pieces_that_may_continue_a_run() -> None:
    made = table((0, 1), (0, 2))
    pieces = made.append([Block(0, 3), Block(0, 4), Block(5, 0)], writable=True)
    assert pieces == [MappedRun(2, 0, 3, 2, True), MappedRun(4, 5, 0, 1, True)]
    assert made.runs == [MappedRun(0, 0, 1, 4, True), MappedRun(4, 5, 0, 1, True)]


def test_what_may_be_written_and_what_may_not_are_different_mappings() -> None:
    made = PageTable()
    made.append([Block(0, 0)], writable=False)
    made.append([Block(0, 1)], writable=True)
    assert [run.writable for run in made.runs] == [False, True]


def test_cutting_a_table_takes_runs_away_and_shortens_the_last() -> None:
    made = table((0, 1), (0, 2), (0, 3), (4, 0), (5, 0))
    blocks = made.blocks[:]
    assert made.cut(2) == blocks[2:]
    assert made.runs == [MappedRun(0, 0, 1, 2, True)]
    assert made.cut(0) == blocks[:2]
    assert made.runs == []
    assert made.end == 0


def test_every_run_and_the_gap_behind_it_are_counted_in_every_region() -> None:
    buffer = SparseBuffer(0, table((0, 0), (0, 1), (2, 0)))
    assert buffer.mappings(regions=10) == 10 * (2 + 1)
    assert SparseBuffer(0).mappings(regions=10) == 0


def test_blocks_that_are_being_mapped_cannot_be_used_yet() -> None:
    buffer = SparseBuffer(0, table((0, 0), (0, 1), (2, 0)), [Pending(ticket=1, count=1)])
    assert buffer.mapped_blocks == 2


def test_a_new_heap_is_free_clean_and_nobodys() -> None:
    heap = SparseHeap(7, 3)
    assert [(block.heap, block.place) for block in heap.blocks] == [(7, 0), (7, 1), (7, 2)]
    assert list(heap.states()) == [BlockState.FREE] * 3
    assert not any(block.dirty for block in heap.blocks)
    assert not any(block.buffers or block.sequences for block in heap.blocks)
    assert (heap.free, heap.find_free(3), heap.find_free(4)) == (3, 0, -1)


def test_room_for_a_run_is_found_between_blocks_that_are_taken() -> None:
    heap = SparseHeap(0, 6)
    for place in (0, 3):
        heap.note_free(heap.blocks[place], is_free=False)
    assert [heap.find_free(count) for count in (1, 2, 3)] == [1, 1, -1]
    heap.note_free(heap.blocks[3], is_free=True)
    assert (heap.free, heap.find_free(5), heap.find_free(6)) == (5, 1, -1)


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 1)]), ([1, 2, 3, 7, 9, 10], [(1, 3), (7, 1), (9, 2)])],
)
def test_runs_are_maximal(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(numbers) == runs
