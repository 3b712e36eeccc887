import pytest

from kvcache.block import BlockState
from kvcache.sparse_heap import SparseHeap, runs_of


def test_a_new_heap_is_free_clean_and_nobodys() -> None:
    heap = SparseHeap.of(7, 3)
    assert [(block.heap, block.place) for block in heap.blocks] == [(7, 0), (7, 1), (7, 2)]
    assert list(heap.states()) == [BlockState.FREE] * 3
    assert not any(block.dirty for block in heap.blocks)
    assert not any(block.buffers or block.sequences for block in heap.blocks)
    assert heap.free == 3


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 1)]), ([1, 2, 3, 7, 9, 10], [(1, 3), (7, 1), (9, 2)])],
)
def test_runs_are_maximal(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(numbers) == runs
