import pytest

from kvcache.heap_pool import BlockRef, BlockState, HeapPool, runs_of
from kvcache.layout import Group, KVShape, paged_layout
from tests.kvcache.fakes import FakeBackend

SHAPE = KVShape(num_layers=1, kv_heads=1, head_dim=64, itemsize=4)
HEAP_BLOCKS = 4


def small_group() -> Group:
    block = 2 * 4096
    return paged_layout(
        SHAPE,
        max_tokens=1024,
        heap_bytes=HEAP_BLOCKS * block,
        system_page_bytes=4096,
        page_bytes=4096,
    ).group


def small_pool(heaps: int = 3, **changes: object) -> tuple[HeapPool, FakeBackend]:
    group = small_group()
    backend = FakeBackend(group, **changes)  # type: ignore[arg-type]
    return HeapPool(group, backend, heaps * group.heap_bytes), backend


def take(pool: HeapPool, count: int, after: BlockRef | None = None) -> list[BlockRef]:
    blocks = pool.allocate(count, after)
    assert blocks is not None
    pool.check_invariants()
    return blocks


def give_back(pool: HeapPool, blocks: list[BlockRef]) -> None:
    pool.quarantine(blocks)
    pool.check_invariants()
    pool.free(blocks)
    pool.check_invariants()


def test_heaps_are_made_one_at_a_time_and_only_when_needed() -> None:
    pool, backend = small_pool()
    assert (pool.num_heaps, pool.capacity_blocks, pool.available_blocks) == (0, 12, 12)
    take(pool, 1)
    assert backend.heaps == 1
    take(pool, HEAP_BLOCKS)
    assert backend.heaps == 2
    assert pool.available_blocks == 12 - 5


def test_the_budget_is_never_exceeded() -> None:
    pool, backend = small_pool(heaps=2)
    assert pool.allocate(9) is None
    assert backend.heaps == 0, "what cannot be had makes no heap"
    take(pool, 8)
    assert pool.allocate(1) is None
    assert backend.heaps == 2


def test_a_budget_below_one_heap_gives_nothing() -> None:
    group = small_group()
    pool = HeapPool(group, FakeBackend(group), group.heap_bytes - 1)
    assert pool.capacity_blocks == 0
    assert pool.allocate(1) is None


def test_consecutive_blocks_are_preferred() -> None:
    pool, _ = small_pool()
    first = take(pool, 2)
    assert first == [BlockRef(0, 0), BlockRef(0, 1)]
    assert take(pool, 1, after=first[-1]) == [BlockRef(0, 2)]


def test_a_taken_successor_is_passed_over() -> None:
    pool, _ = small_pool()
    first = take(pool, 1)
    take(pool, 1)  # (0, 1)
    assert take(pool, 1, after=first[0]) == [BlockRef(0, 2)]


def test_the_fullest_heap_is_filled_first_so_that_others_can_empty() -> None:
    pool, _ = small_pool()
    blocks = take(pool, 12)
    give_back(pool, blocks[0:3] + blocks[4:5])  # heap 0 has three free, heap 1 one
    assert take(pool, 1) == [BlockRef(1, 0)]


def test_an_earlier_place_is_found_when_the_end_of_the_heap_is_full() -> None:
    pool, _ = small_pool(heaps=1)
    blocks = take(pool, 4)
    give_back(pool, [blocks[0]])
    assert take(pool, 1, after=blocks[1]) == [blocks[0]]


def test_a_quarantined_block_is_not_handed_out() -> None:
    pool, _ = small_pool(heaps=1)
    blocks = take(pool, 4)
    pool.quarantine(blocks)
    assert pool.available_blocks == 0
    assert pool.allocate(1) is None
    pool.free(blocks)
    assert len(take(pool, 4)) == 4


def test_a_system_without_memory_leaves_no_trace() -> None:
    pool, backend = small_pool(fail_at=2)
    taken = take(pool, 3)
    assert pool.allocate(5) is None, "the second heap is refused"
    pool.check_invariants()
    assert pool.count(BlockState.OWNED) == len(taken)
    assert backend.heaps == 1
    assert len(take(pool, 5)) == 5, "later it may be there again"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda pool, block: pool.free([block]), "is OWNED, not QUARANTINED"),
        (lambda pool, block: pool.quarantine([BlockRef(0, 3)]), "is FREE, not OWNED"),
    ],
)
def test_a_block_out_of_turn_is_a_bug(action, message) -> None:  # type: ignore[no-untyped-def]
    pool, _ = small_pool()
    (block,) = take(pool, 1)
    with pytest.raises(AssertionError, match=message):
        action(pool, block)


def test_untouched_blocks_are_no_slack() -> None:
    pool, _ = small_pool()
    take(pool, 1)
    assert pool.free_committed_bytes == 0


def test_whole_free_heaps_are_given_back_first_and_in_one_piece() -> None:
    pool, backend = small_pool()
    blocks = take(pool, 12)
    give_back(pool, blocks[:9])  # heaps 0 and 1 are free, heap 2 has one free block
    pool.trim(5 * small_group().block_bytes)
    assert backend.released == [(0, 0, 4)]
    assert pool.count(BlockState.RETURNING) == 0 or backend.at_once
    pool.poll(backend.completed)
    assert pool.free_committed_bytes == 5 * small_group().block_bytes
    pool.check_invariants()


def test_single_blocks_follow_when_no_heap_is_free() -> None:
    pool, backend = small_pool()
    blocks = take(pool, 12)
    give_back(pool, [blocks[1], blocks[2], blocks[5]])
    pool.trim(0)
    assert sorted(backend.released) == [(0, 1, 2), (1, 1, 1)]
    pool.poll(backend.completed)
    assert pool.free_committed_bytes == 0
    assert pool.count(BlockState.OWNED) == 9


def test_no_more_single_blocks_are_given_back_than_the_slack_asks_for() -> None:
    pool, backend = small_pool(heaps=1)
    blocks = take(pool, 4)
    give_back(pool, [blocks[0], blocks[2]])
    pool.trim(small_group().block_bytes)
    assert backend.released == [(0, 0, 1)]


def test_single_blocks_are_kept_where_the_system_gives_back_whole_heaps_only() -> None:
    pool, backend = small_pool(releases_blocks=False)
    blocks = take(pool, 8)
    give_back(pool, blocks[:5])
    pool.trim(0)
    assert backend.released == [(0, 0, 4)]
    assert pool.free_committed_bytes == small_group().block_bytes


def test_slack_is_kept() -> None:
    pool, backend = small_pool()
    give_back(pool, take(pool, 4))
    pool.trim(4 * small_group().block_bytes)
    assert backend.released == []


def test_memory_on_its_way_back_is_not_handed_out_and_counts_until_it_has_gone() -> None:
    pool, backend = small_pool(heaps=1, at_once=False)
    give_back(pool, take(pool, 4))
    pool.trim(0)
    assert pool.count(BlockState.RETURNING) == 4
    assert pool.allocate(1) is None
    pool.poll(backend.completed)
    assert pool.count(BlockState.RETURNING) == 4
    backend.complete()
    pool.poll(backend.completed)
    assert pool.count(BlockState.RETURNING) == 0
    assert pool.free_committed_bytes == 0
    take(pool, 4)


def test_a_returned_heap_is_not_returned_again() -> None:
    pool, backend = small_pool()
    give_back(pool, take(pool, 4))
    for _ in range(3):
        pool.trim(0)
        pool.poll(backend.completed)
    assert len(backend.released) == 1


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [([], []), ([3], [(3, 1)]), ([1, 2, 3, 7, 9, 10], [(1, 3), (7, 1), (9, 2)])],
)
def test_runs_are_maximal(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert runs_of(numbers) == runs
