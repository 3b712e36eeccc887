from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

import pytest

from kvcache.backends.backend import Releases
from kvcache.layout import Group, KVFormat, KVShape, KVSpec, paged_layout
from kvcache.pool import HeapPool
from kvcache.records import Block, BlockState, SparseBuffer, runs_of
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory

SHAPE = KVShape.uniform(1, KVSpec(1, 64, KVFormat.FLOAT32))
HEAP_BLOCKS = 4
EVERYTHING = 1000


def small_group() -> Group:
    block = 2 * 4096
    return paged_layout(
        SHAPE,
        max_tokens=1024,
        heap_bytes=HEAP_BLOCKS * block,
        system_page_bytes=4096,
        page_bytes=4096,
    ).groups[0]


def small_pool(heaps: int = 3, **changes: object) -> tuple[HeapPool, StrictMemory]:
    group = small_group()
    backend = StrictMemory(group, **changes)  # type: ignore[arg-type]
    return HeapPool(group, backend, heaps * group.heap_bytes), backend


def take(pool: HeapPool, count: int, after: Block | None = None) -> list[Block]:
    blocks = pool.allocate(count, after)
    assert blocks is not None
    pool.check_invariants()
    return blocks


def free(pool: HeapPool, blocks: list[Block]) -> None:
    pool.detach(blocks)
    pool.check_invariants()
    for block in blocks:
        assert pool.remove_buffer(block)
        pool.free(block)
    pool.check_invariants()


def places(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    return [(block.heap, block.place) for block in blocks]


def sealed(pool: HeapPool) -> Block:
    (block,) = take(pool, 1)
    pool.seal(block)
    return block


def test_heaps_are_made_one_at_a_time_and_only_when_needed() -> None:
    pool, backend = small_pool()
    assert (len(pool.heaps), pool.capacity_blocks, pool.free_blocks) == (0, 12, 12)
    take(pool, 1)
    assert backend.heaps == 1
    take(pool, HEAP_BLOCKS)
    assert backend.heaps == 2
    assert pool.free_blocks == 12 - 5


def test_the_budget_is_never_exceeded() -> None:
    pool, backend = small_pool(heaps=2)
    assert pool.allocate(9) is None
    assert backend.heaps == 0, "what cannot be had makes no heap"
    take(pool, 8)
    assert pool.allocate(1) is None
    assert backend.heaps == 2


def test_a_budget_below_one_heap_gives_nothing() -> None:
    group = small_group()
    pool = HeapPool(group, StrictMemory(group), group.heap_bytes - 1)
    assert pool.capacity_blocks == 0
    assert pool.allocate(1) is None


def test_consecutive_blocks_are_preferred() -> None:
    pool, _ = small_pool()
    first = take(pool, 2)
    assert places(first) == [(0, 0), (0, 1)]
    assert places(take(pool, 1, after=first[-1])) == [(0, 2)]


def test_a_taken_successor_is_passed_over() -> None:
    pool, _ = small_pool(releases=Releases.HEAPS)
    first = take(pool, 1)
    take(pool, 1)  # (0, 1)
    assert places(take(pool, 1, after=first[0])) == [(0, 2)]


def test_the_fullest_heap_is_filled_first_so_that_others_can_empty() -> None:
    pool, _ = small_pool(releases=Releases.HEAPS)
    blocks = take(pool, 12)
    free(pool, blocks[0:3] + blocks[4:5])  # heap 0 has three free, heap 1 one
    assert places(take(pool, 1)) == [(1, 0)]


def test_where_single_blocks_go_back_a_run_begins_in_the_emptiest_heap() -> None:
    pool, _ = small_pool()
    blocks = take(pool, 12)
    free(pool, blocks[0:1] + blocks[5:8])
    assert places(take(pool, 1)) == [(1, 1)]


def test_a_run_begins_where_it_and_the_one_before_it_can_grow() -> None:
    group = replace(small_group(), blocks_per_heap=200)
    pool = HeapPool(group, StrictMemory(group), group.heap_bytes)
    (first,) = take(pool, 1)
    assert places([first]) == [(0, 0)]
    (second,) = take(pool, 1)
    assert second.place > 16
    assert places(take(pool, 8, after=first))[-1] == (0, 8)
    assert places(take(pool, 8, after=second))[-1] == (0, second.place + 8)


def test_two_sequences_that_grow_in_turn_have_a_run_each() -> None:
    group = replace(small_group(), blocks_per_heap=200)
    pool = HeapPool(group, StrictMemory(group), group.heap_bytes)
    runs = [take(pool, 1), take(pool, 1)]
    for _ in range(20):
        for run in runs:
            run += take(pool, 1, after=run[-1])
    assert all(len(runs_of([block.place for block in run])) == 1 for run in runs)


def test_the_descriptors_of_the_process_limit_the_heaps() -> None:
    group = small_group()
    pool = HeapPool(group, StrictMemory(group, heap_limit=2), 3 * group.heap_bytes)
    assert pool.capacity_blocks == 2 * HEAP_BLOCKS


def test_an_earlier_place_is_found_when_the_end_of_the_heap_is_full() -> None:
    pool, _ = small_pool(heaps=1)
    blocks = take(pool, 4)
    free(pool, [blocks[0]])
    assert take(pool, 1, after=blocks[1]) == [blocks[0]]


def test_a_system_without_memory_leaves_no_trace() -> None:
    pool, backend = small_pool(faults=MemoryFaults(fail_at=2))
    taken = take(pool, 3)
    assert pool.allocate(5) is None, "the second heap is refused"
    pool.check_invariants()
    assert pool.count(BlockState.OWNED) == len(taken)
    assert backend.heaps == 1
    assert len(take(pool, 5)) == 5, "later it may be there again"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda pool, block: pool.seal(pool.heaps[0].blocks[3]), "is FREE"),
        (lambda pool, block: pool.attach(block), "is OWNED"),
        (lambda pool, block: pool.free(block), "is mapped"),
        (lambda pool, block: pool.cache(block), "is mapped"),
    ],
)
def test_a_block_out_of_turn_is_a_bug(action, message) -> None:  # type: ignore[no-untyped-def]
    pool, _ = small_pool()
    (block,) = take(pool, 1)
    with pytest.raises(AssertionError, match=message):
        action(pool, block)


def test_whole_free_heaps_are_given_back_first_and_in_one_piece() -> None:
    pool, backend = small_pool()
    blocks = take(pool, 12)
    free(pool, blocks[:9])  # heaps 0 and 1 are free, heap 2 has one free block
    pool.release_memory(5 * small_group().block_bytes, EVERYTHING)
    assert backend.released == [(0, 0, 4)]
    assert pool.count(BlockState.RELEASING) == 0 or backend.at_once
    pool.poll(backend.completed)
    assert pool.free_committed_bytes == 5 * small_group().block_bytes
    pool.check_invariants()


def test_single_blocks_follow_when_no_heap_is_free() -> None:
    pool, backend = small_pool()
    blocks = take(pool, 12)
    free(pool, [blocks[1], blocks[2], blocks[5]])
    pool.release_memory(0, EVERYTHING)
    assert sorted(backend.released) == [(0, 1, 2), (1, 1, 1)]
    pool.poll(backend.completed)
    assert pool.free_committed_bytes == 0
    assert pool.count(BlockState.OWNED) == 9


def test_no_more_single_blocks_are_given_back_than_the_slack_asks_for() -> None:
    pool, backend = small_pool(heaps=1)
    blocks = take(pool, 4)
    free(pool, [blocks[0], blocks[2]])
    pool.release_memory(small_group().block_bytes, EVERYTHING)
    assert backend.released == [(0, 0, 1)]


def test_single_blocks_are_kept_where_the_system_gives_back_whole_heaps_only() -> None:
    pool, backend = small_pool(releases=Releases.HEAPS)
    blocks = take(pool, 8)
    free(pool, blocks[:5])
    pool.release_memory(0, EVERYTHING)
    assert backend.released == [(0, 0, 4)]
    assert pool.free_committed_bytes == small_group().block_bytes


@pytest.mark.parametrize(("most", "released"), [(3, []), (4, [(0, 0, 4)]), (7, [(0, 0, 4)])])
def test_no_more_is_given_back_than_can_be_spared(
    most: int, released: list[tuple[int, int, int]]
) -> None:
    pool, backend = small_pool(releases=Releases.HEAPS)
    free(pool, take(pool, 8))
    pool.release_memory(0, most)
    assert backend.released == released


def test_slack_is_kept() -> None:
    pool, backend = small_pool()
    free(pool, take(pool, 4))
    pool.release_memory(4 * small_group().block_bytes, EVERYTHING)
    assert backend.released == []


def test_memory_on_its_way_back_is_not_handed_out_and_counts_until_it_has_gone() -> None:
    pool, backend = small_pool(heaps=1, at_once=False)
    free(pool, take(pool, 4))
    pool.release_memory(0, EVERYTHING)
    assert pool.count(BlockState.RELEASING) == 4
    assert pool.allocate(1) is None
    pool.poll(backend.completed)
    assert pool.count(BlockState.RELEASING) == 4
    backend.complete()
    pool.poll(backend.completed)
    assert pool.count(BlockState.RELEASING) == 0
    assert pool.free_committed_bytes == 0
    take(pool, 4)


def test_a_returned_heap_is_not_returned_again() -> None:
    pool, backend = small_pool()
    free(pool, take(pool, 4))
    for _ in range(3):
        pool.release_memory(0, EVERYTHING)
        pool.poll(backend.completed)
    assert len(backend.released) == 1


# --- sharing --------------------------------------------------------------------------------------


def test_a_sealed_block_waits_until_the_last_sequence_has_left_it() -> None:
    pool, _ = small_pool()
    block = sealed(pool)
    pool.attach(block)
    assert (block.sequences, block.buffers) == (2, 2)
    pool.detach([block])
    with_one = block.state
    pool.detach([block])
    assert (with_one, block.state) == (BlockState.SEALED, BlockState.QUARANTINED)
    assert not pool.remove_buffer(block), "the other buffer has it still"
    assert pool.remove_buffer(block)
    pool.check_invariants()


def test_a_cached_block_is_not_handed_out_until_it_is_freed() -> None:
    pool, _ = small_pool(heaps=1)
    block = sealed(pool)
    pool.detach([block])
    assert pool.remove_buffer(block)
    pool.cache(block)
    assert pool.free_blocks == HEAP_BLOCKS - 1
    pool.free(block)
    assert pool.free_blocks == HEAP_BLOCKS
    assert places(pool.blocks()) == [(0, place) for place in range(HEAP_BLOCKS)]


# --- what the system charges for ----------------------------------------------------------------


def test_a_heap_that_is_charged_whole_is_slack_as_a_whole() -> None:
    pool, _ = small_pool(releases=Releases.HEAPS)
    block = small_group().block_bytes
    (taken,) = take(pool, 1)
    assert pool.free_committed_bytes == (HEAP_BLOCKS - 1) * block
    free(pool, [taken])
    assert pool.free_committed_bytes == HEAP_BLOCKS * block


def test_a_heap_that_was_released_is_charged_again_as_a_whole() -> None:
    pool, backend = small_pool(releases=Releases.HEAPS)
    free(pool, take(pool, 2))
    pool.release_memory(0, EVERYTHING)
    pool.poll(backend.completed)
    assert pool.free_committed_bytes == 0
    take(pool, 1)
    assert pool.free_committed_bytes == (HEAP_BLOCKS - 1) * small_group().block_bytes


def test_an_arena_is_made_and_charged_before_anybody_asks() -> None:
    pool, backend = small_pool(heaps=3, releases=Releases.ARENA)
    pool.check_invariants()
    assert backend.heaps == len(pool.heaps) == 3
    assert pool.free_committed_bytes == 12 * small_group().block_bytes
    assert len(take(pool, 12)) == 12
    assert pool.free_committed_bytes == 0


def test_an_arena_whose_slices_are_refused_has_those_that_were_not() -> None:
    pool, _ = small_pool(heaps=3, releases=Releases.ARENA, faults=MemoryFaults(fail_at=3))
    assert len(pool.heaps) == 2
    assert len(take(pool, 8)) == 8


def test_heaps_that_are_kept_are_never_released_and_runs_begin_where_they_can_grow() -> None:
    pool, backend = small_pool(releases=Releases.NOTHING)
    blocks = take(pool, 7)
    free(pool, blocks[:3])
    pool.release_memory(0, EVERYTHING)
    assert backend.released == []
    (begun,) = take(pool, 1)
    assert begun.heap == 0, "three blocks in a row are free there"


def test_what_sharing_saves_is_counted_as_long_as_it_lasts() -> None:
    pool, _ = small_pool()
    block, other = sealed(pool), sealed(pool)
    saved = []
    for joining in (block, block, other):
        pool.attach(joining)
        pool.check_invariants()
        saved.append(pool.saved_blocks)
    for leaving in ([block, other], [block], [block]):
        pool.detach(leaving)
        pool.check_invariants()
        saved.append(pool.saved_blocks)
    pool.attach(block)
    assert [*saved, pool.saved_blocks] == [1, 2, 3, 1, 0, 0, 0]


def test_a_miscount_of_what_sharing_saves_is_found() -> None:
    pool, _ = small_pool()
    pool.attach(sealed(pool))
    pool.saved_blocks += 1
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_a_limit_keeps_what_is_used_and_all_beyond_it_goes_back() -> None:
    pool, backend = small_pool(heaps=3)
    first, second = take(pool, 6), take(pool, 4)
    free(pool, second)
    assert pool.set_limit(2) == pool.capacity_blocks == 6, "somebody has them"
    pool.release_memory(EVERYTHING, EVERYTHING)
    assert (pool.free_committed_bytes, pool.allocate(1)) == (0, None)
    backend.complete()
    pool.poll(backend.completed)
    free(pool, first)
    assert pool.set_limit(2) == 2
    assert (pool.free_blocks, len(take(pool, 2)), pool.allocate(1)) == (2, 2, None)
    assert pool.set_limit(EVERYTHING) == 3 * HEAP_BLOCKS, "the budget's"
    take(pool, 10)


@pytest.mark.parametrize(
    ("releases", "allowed"), [(Releases.NOTHING, 2), (Releases.HEAPS, 1), (Releases.IDLE, 1)]
)
def test_a_limit_counts_heaps_that_cannot_be_given_back(releases: Releases, allowed: int) -> None:
    pool, _ = small_pool(heaps=3, releases=releases)
    blocks = take(pool, HEAP_BLOCKS + 1)
    free(pool, blocks[1:])
    assert pool.set_limit(0) == allowed * HEAP_BLOCKS
    pool.check_invariants()


def test_a_heap_whose_free_blocks_are_still_mapped_counts_as_one_that_can_be_given_back() -> None:
    pool, _ = small_pool(heaps=3, releases=Releases.HEAPS)
    blocks = take(pool, HEAP_BLOCKS + 1)
    pool.add_premapped(blocks[-1], mock.Mock(SparseBuffer, free_premapped=0))
    free(pool, blocks[1:])
    assert pool.set_limit(0) == HEAP_BLOCKS
    pool.check_invariants()
