import pytest

from kvcache.block import BlockState
from kvcache.sparse_heap import SparseHeap, runs_of


def test_a_new_heap_is_free_clean_and_nobodys() -> None:
    heap = SparseHeap.of(7, 3)
    assert [(block.heap, block.place) for block in heap.blocks] == [(7, 0), (7, 1), (7, 2)]
    assert list(heap.states()) == [BlockState.FREE] * 3
    assert not any(block.dirty for block in heap.blocks)
    assert not any(block.buffers or block.sequences for block in heap.blocks)
    assert (heap.free, heap.find_free(3), heap.find_free(4)) == (3, 0, -1)


def test_room_for_a_run_is_found_between_blocks_that_are_taken() -> None:
    heap = SparseHeap.of(0, 6)
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
