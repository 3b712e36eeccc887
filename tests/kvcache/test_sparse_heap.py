import pytest

from kvcache.sparse_heap import BlockState, SparseHeap, runs_of


def test_a_new_heap_is_free_clean_and_nobodys() -> None:
    heap = SparseHeap.of(3)
    assert list(heap.states) == [BlockState.FREE] * 3
    assert not any(heap.dirty)
    heap.buffers[1] = 2
    assert list(heap.sequences) == [0, 0, 0]
    assert heap.free == 3


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 1)]), ([1, 2, 3, 7, 9, 10], [(1, 3), (7, 1), (9, 2)])],
)
def test_runs_are_maximal(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(numbers) == runs


def test_whoever_joins_is_told_of_others_and_whoever_leaves_too() -> None:
    heap = SparseHeap.of(2)
    assert [heap.attach(1), heap.attach(1), heap.attach(0)] == [False, True, False]
    assert (list(heap.buffers), list(heap.sequences)) == ([1, 2], [1, 2])
    assert [heap.detach(1), heap.detach(1)] == [True, False]
    assert (list(heap.buffers), list(heap.sequences)) == ([1, 2], [1, 0])
