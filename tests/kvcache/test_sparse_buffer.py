from kvcache.heap_pool import BlockRef
from kvcache.sparse_buffer import MappedRun, PageTable, SparseBuffer


def table(*blocks: tuple[int, int]) -> PageTable:
    return PageTable([BlockRef(*block) for block in blocks])


def test_consecutive_blocks_of_one_heap_are_one_mapping() -> None:
    runs = table((0, 1), (0, 2), (0, 3)).runs()
    assert runs == [MappedRun(block=0, heap=0, heap_block=1, count=3)]


def test_a_gap_a_step_back_and_another_heap_begin_a_new_mapping() -> None:
    runs = table((0, 1), (0, 3), (0, 2), (1, 3), (1, 4)).runs()
    assert [(r.block, r.heap, r.heap_block, r.count) for r in runs] == [
        (0, 0, 1, 1),
        (1, 0, 3, 1),
        (2, 0, 2, 1),
        (3, 1, 3, 2),
    ]


def test_runs_of_the_end_of_a_table_keep_their_places() -> None:
    assert table((0, 1), (0, 2), (0, 3)).runs(first=2) == [MappedRun(2, 0, 3, 1)]


def test_every_run_and_the_gap_behind_it_are_counted_in_every_region() -> None:
    buffer = SparseBuffer(0, table((0, 0), (0, 1), (2, 0)))
    assert len(buffer.table) == 3
    assert buffer.mappings(regions=10) == 10 * (2 + 1)
