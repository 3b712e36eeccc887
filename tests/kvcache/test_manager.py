import pytest

from kvcache.backends.backend import BackendFailedError, Releases
from kvcache.layout import dense_layout
from kvcache.manager import KVCacheManager
from tests.kvcache.managers import (
    BLOCK,
    HEAP_BLOCKS,
    SHAPE,
    TOKENS,
    complete_steps,
    full_group,
    grow,
    join,
    paged,
    settle,
    small_manager,
)
from tests.kvcache.memory_faults import MemoryFaults


def test_a_sequence_grows_block_by_block() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, 10)
    grow(kv, 1, 0, 10)
    assert len(backend.mapped) == 1
    grow(kv, 1, 10, 6)
    assert len(backend.mapped) == 1
    grow(kv, 1, 16, 1)
    assert len(backend.mapped) == 2


def test_reserve_is_all_or_nothing() -> None:
    kv, backend = small_manager(heaps=1)
    assert join(kv, 1, 16)
    grow(kv, 1, 0, 16)
    before = dict(backend.mapped)
    assert not kv.reserve(1, 16 * 5), "four blocks are all there are"
    assert backend.mapped == before
    kv.check_invariants()
    assert kv.reserve(1, 16 * 4)


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_fault_04_a_refusal_of_the_system_at_any_call_leaves_no_trace(fail_at: int) -> None:
    kv, backend = small_manager(faults=MemoryFaults(fail_at=fail_at))
    # Interleaved sequences, so that one reservation takes several mappings.
    opened = [seq for seq in (1, 2) if join(kv, seq, 1)]
    for tokens in (16, 64):
        for seq in opened:
            before = dict(backend.mapped)
            if not kv.reserve(seq, tokens):
                assert backend.mapped == before
            kv.check_invariants()
    for seq in opened:
        kv.close(seq)
    settle(kv, backend)
    assert backend.mapped == {}
    stats = kv.stats()
    assert stats.live_bytes == stats.quarantined_bytes == 0
    assert stats.committed_bytes <= HEAP_BLOCKS * BLOCK, "the slack"


def test_blocks_that_are_reserved_cannot_be_taken_by_others() -> None:
    kv, _ = small_manager(heaps=1, sequences=2)
    assert join(kv, 1, 1)
    grow(kv, 1, 0, 1)
    assert join(kv, 2, 32), "two blocks, and one left for the first to grow"
    assert kv.reserve(1, 32)
    assert not kv.reserve(1, 48), "the last two are reserved"
    assert kv.reserve(2, 32)
    kv.check_invariants()


def test_all_that_fits_is_opened() -> None:
    kv, _ = small_manager(heaps=1)
    assert join(kv, 1, 16)
    assert join(kv, 2, 32)
    assert not join(kv, 3, 32)
    assert join(kv, 3, 16)
    kv.check_invariants()


def test_no_more_sequences_than_allowed_are_open() -> None:
    kv, _ = small_manager(sequences=2)
    assert join(kv, 1, 1)
    assert join(kv, 2, 1)
    assert not join(kv, 3, 1)


def test_a_prompt_beyond_the_addresses_is_not_opened_and_not_reserved() -> None:
    kv, _ = small_manager(paged(max_tokens=32))
    assert not join(kv, 1, 33)
    assert join(kv, 1, 32)
    assert not kv.reserve(1, 33)
    assert kv.max_tokens == 32


def test_the_longest_sequence_is_bounded_by_the_pool_as_well() -> None:
    kv, _ = small_manager(heaps=1)
    assert kv.max_tokens == HEAP_BLOCKS * TOKENS


def test_blocks_of_a_closed_sequence_wait_for_the_step_that_may_touch_them() -> None:
    kv, backend = small_manager(heaps=1, at_once=False)
    assert join(kv, 1, 64)
    epoch = grow(kv, 1, 0, 64)
    kv.close(1)
    kv.step_completed(epoch - 1)
    assert len(backend.mapped) == 4, "the step may still read them"
    assert kv.stats().quarantined_bytes == 4 * BLOCK
    assert not join(kv, 2, 64)
    kv.step_completed(epoch)
    assert backend.issued == 1, "now their unmapping begins"
    assert kv.stats().quarantined_bytes == 4 * BLOCK, "but not free before that is done"
    assert not join(kv, 2, 64)
    backend.complete()
    kv.step_completed(epoch)
    assert kv.stats().quarantined_bytes == 0
    kv.check_invariants()
    assert join(kv, 2, 64)


def test_a_sequence_that_never_computed_leaves_at_once() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, 1)
    kv.close(1)
    kv.step_completed(0)
    kv.check_invariants()
    assert backend.issued == 0
    assert kv.stats().num_sequences == 0


def test_a_buffer_is_reused_by_later_sequences() -> None:
    kv, backend = small_manager(sequences=2)
    for seq in range(20):
        assert join(kv, seq, 1)
        grow(kv, seq, 0, 1)
        kv.close(seq)
        settle(kv, backend)
    assert backend.buffers == 1


def test_a_newcomer_need_not_wait_for_the_unmapping_of_one_who_left() -> None:
    kv, backend = small_manager(sequences=1, at_once=False)
    assert join(kv, 1, 1)
    kv.step_completed(grow(kv, 1, 0, 1))
    kv.close(1)
    assert join(kv, 2, 1)
    grow(kv, 2, 0, 1)
    assert backend.buffers == 2


def test_buffers_are_bounded() -> None:
    kv, _ = small_manager(sequences=1, at_once=False)
    for seq in (1, 2):
        assert join(kv, seq, 1)
        grow(kv, seq, 0, 1)
        kv.close(seq)
    assert not join(kv, 3, 1), "both buffers wait for their unmapping"
    kv.check_invariants()


def test_the_figures_add_up_to_the_capacity() -> None:
    kv, backend = small_manager(at_once=False)
    assert join(kv, 1, 20)
    grow(kv, 1, 0, 20)
    assert kv.reserve(1, 40)
    assert join(kv, 2, 5)
    epoch = grow(kv, 2, 0, 5)
    kv.close(2)
    kv.step_completed(epoch)
    stats = kv.stats()
    row = SHAPE.bytes_per_token
    assert stats.live_bytes == 20 * row
    assert stats.partial_tail_bytes == 12 * row
    assert stats.mapped_ahead_bytes == BLOCK
    assert stats.quarantined_bytes == BLOCK
    assert stats.free_bytes == stats.capacity_bytes - 4 * BLOCK
    assert stats.capacity_bytes == 2 * HEAP_BLOCKS * BLOCK
    assert stats.committed_bytes == backend.committed_bytes() == 4 * BLOCK
    assert stats.num_heaps == 1
    assert stats.num_sequences == 1


def test_tokens_of_the_running_step_are_live_before_they_are_committed() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 10)
    assert kv.reserve(1, 10)
    kv.views([(1, 0, 10)])
    assert kv.stats().live_bytes == 10 * SHAPE.bytes_per_token


def test_memory_beyond_the_slack_goes_back_and_idleness_leaves_one_heap() -> None:
    kv, backend = small_manager(heaps=4)
    assert join(kv, 1, 16 * 12)
    grow(kv, 1, 0, 16 * 12)
    kv.close(1)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 12 * BLOCK, "somebody may begin alike"
    kv.evict_prefixes()
    settle(kv, backend)
    assert kv.stats().committed_bytes == HEAP_BLOCKS * BLOCK, "the slack is one heap at least"
    kv.release_idle_memory()
    assert kv.stats().committed_bytes <= HEAP_BLOCKS * BLOCK
    kv.check_invariants()


def test_a_gpus_heaps_go_back_only_when_nothing_runs() -> None:
    kv, backend = small_manager(heaps=4, shares_prefixes=False, releases=Releases.IDLE)
    for seq in (1, 2, 3):
        assert join(kv, seq, 64)
        grow(kv, seq, 0, 64)
    for seq in (1, 2):
        kv.close(seq)
    settle(kv, backend)
    assert backend.released == [], "a sequence is still there"
    kv.close(3)
    settle(kv, backend)
    assert kv.stats().committed_bytes == 3 * HEAP_BLOCKS * BLOCK
    for _ in range(3):
        kv.release_idle_memory()
        backend.complete()
    assert kv.stats().committed_bytes == HEAP_BLOCKS * BLOCK
    kv.check_invariants()


def test_fault_25_a_gpus_heaps_do_not_go_back_before_nothing_runs() -> None:
    """Memory pressure changes nothing about that."""
    kv, backend = small_manager(heaps=4, releases=Releases.IDLE)
    kv.set_memory_pressure(short=True)
    assert join(kv, 1, 2 * TOKENS * HEAP_BLOCKS)
    assert join(kv, 2, TOKENS)
    grow(kv, 1, 0, 2 * TOKENS * HEAP_BLOCKS)
    grow(kv, 2, 0, TOKENS)
    kv.close(1)
    settle(kv, backend)
    committed = kv.stats().committed_bytes
    kv.evict_prefixes()
    settle(kv, backend)
    assert kv.stats().committed_bytes == committed
    kv.close(2)
    settle(kv, backend)
    kv.evict_prefixes()
    settle(kv, backend)
    assert kv.stats().committed_bytes == full_group(kv).group.heap_bytes


def kept_heaps(heaps: int, prefix_heaps: int) -> KVCacheManager:
    """A cache on a system that takes no heap back and is short of memory; some heaps hold a
    prefix."""
    kv, backend = small_manager(heaps=heaps, releases=Releases.NOTHING)
    kv.set_memory_pressure(short=True)
    assert join(kv, 1, prefix_heaps * HEAP_BLOCKS * TOKENS)
    grow(kv, 1, 0, prefix_heaps * HEAP_BLOCKS * TOKENS)
    kv.close(1)
    settle(kv, backend)
    assert kv.stats().cached_bytes == prefix_heaps * HEAP_BLOCKS * BLOCK
    return kv


def test_fault_25_a_heap_that_could_never_go_back_is_spared_where_prefixes_make_room() -> None:
    kv = kept_heaps(4, 2)
    assert join(kv, 2, 3 * TOKENS)
    grow(kv, 2, 0, 3 * TOKENS)
    stats = kv.stats()
    assert (stats.num_heaps, stats.evicted_blocks) == (2, 3)
    kv.set_memory_pressure(short=False)
    assert join(kv, 3, 2 * TOKENS)
    grow(kv, 3, 0, 2 * TOKENS)
    stats = kv.stats()
    assert (stats.num_heaps, stats.evicted_blocks) == (3, 3), "there is memory again"


def test_fault_25_prefixes_have_half_of_the_heaps_before_any_is_spared() -> None:
    kv = kept_heaps(5, 2)
    assert join(kv, 2, 3 * TOKENS)
    grow(kv, 2, 0, 3 * TOKENS)
    stats = kv.stats()
    assert (stats.num_heaps, stats.evicted_blocks) == (3, 0)


def test_fault_25_whoever_needs_more_than_prefixes_hold_gets_heaps_and_ends_none_for_nothing() -> (
    None
):
    kv = kept_heaps(4, 2)
    assert join(kv, 2, 3 * TOKENS)
    grow(kv, 2, 0, 3 * TOKENS)
    evicted = kv.stats().evicted_blocks
    assert join(kv, 3, 7 * TOKENS)
    grow(kv, 3, 0, 7 * TOKENS)
    stats = kv.stats()
    assert (stats.num_heaps, stats.evicted_blocks) == (4, evicted)


def test_heaps_that_are_kept_are_said_to_be() -> None:
    kv, backend = small_manager(heaps=4, releases=Releases.NOTHING)
    assert join(kv, 1, 100)
    grow(kv, 1, 0, 100)
    kv.close(1)
    settle(kv, backend)
    kv.evict_prefixes()
    kv.release_idle_memory()
    stats = kv.stats()
    assert (stats.kept_heaps, stats.num_heaps) == (2, 2)
    assert stats.free_slack_bytes == stats.committed_bytes == 2 * HEAP_BLOCKS * BLOCK
    assert kv.shut_down()


def test_memory_that_is_reserved_is_not_released() -> None:
    kv, backend = small_manager(heaps=2, shares_prefixes=False, releases=Releases.HEAPS)
    for seq, tokens in ((1, 64), (2, 32), (3, 32)):
        assert join(kv, seq, tokens)
        grow(kv, seq, 0, tokens)
    kv.close(1)
    settle(kv, backend)
    assert join(kv, 4, 48)
    kv.close(2)
    settle(kv, backend)
    assert backend.released == [], (
        "six blocks are two too many, but without a heap only two are left"
    )
    assert kv.reserve(4, 48)


def test_blocks_that_the_system_does_not_map_are_not_on_their_way_back() -> None:
    kv, backend = small_manager(heaps=3, mapping_limit=10)
    assert join(kv, 1, 10)
    grow(kv, 1, 0, 10)
    settle(kv, backend)
    backend.mapping_limit = 4
    for _ in range(3):
        assert not kv.reserve(1, 128)
        complete_steps(kv)
        assert not kv.recovering, "whoever waits would wait for ever"


def test_mappings_are_counted_against_the_system_limit() -> None:
    regions = len(paged().groups[0].regions)
    kv, backend = small_manager(mapping_limit=4 * regions)
    assert join(kv, 1, 16)
    grow(kv, 1, 0, 16)  # one run and its gap: 2 mappings per region
    assert join(kv, 2, 16)
    grow(kv, 2, 0, 16)
    before = dict(backend.mapped)
    assert not kv.reserve(1, 32), "the block behind its last one is taken"
    assert backend.mapped == before
    assert not join(kv, 3, 16)
    kv.check_invariants()
    kv.close(2)
    settle(kv, backend)
    assert kv.reserve(1, 32), "room again"


def test_a_sequence_alone_is_opened_whatever_its_mappings() -> None:
    kv, _ = small_manager(mapping_limit=1)
    assert join(kv, 1, 16)
    assert not kv.reserve(1, 16)


def test_consecutive_blocks_cost_no_more_mappings() -> None:
    regions = len(paged().groups[0].regions)
    kv, _ = small_manager(mapping_limit=2 * regions)
    assert join(kv, 1, 16)
    for start in (0, 16, 32):
        grow(kv, 1, start, 16)


def test_planning_out_of_turn_is_a_bug() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 10)
    assert kv.reserve(1, 10)
    with pytest.raises(AssertionError, match="5 != 0"):
        kv.views([(1, 5, 5)])


def test_committing_what_was_never_planned_is_a_bug() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 10)
    with pytest.raises(AssertionError, match="never scheduled"):
        kv.commit(1, [1])


def test_opening_twice_is_a_bug() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 1)
    with pytest.raises(AssertionError, match="sequence 1 is open"):
        join(kv, 1, 1)


def test_an_epoch_that_was_never_opened_cannot_complete() -> None:
    kv, _ = small_manager()
    with pytest.raises(AssertionError):
        kv.step_completed(1)


def test_the_invariants_notice_memory_that_nobody_accounts_for() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, 1)
    grow(kv, 1, 0, 1)
    assert backend.add_buffer()
    assert backend.map(1, 0, 0, 1, 3, writable=True)
    with pytest.raises(AssertionError, match="committed"):
        kv.check_invariants()


def test_a_dense_sequence_takes_its_whole_context_and_never_asks_again() -> None:
    layout = dense_layout(SHAPE, max_tokens=100, system_page_bytes=4096)
    kv, backend = small_manager(layout, heaps=2)
    assert join(kv, 1, 5)
    grow(kv, 1, 0, 5)
    assert join(kv, 2, 5), "a dense sequence cannot grow, so nothing is kept back for it"
    grow(kv, 2, 0, 5)
    assert not join(kv, 3, 5)
    calls = backend.faults.calls
    grow(kv, 1, 5, 95)
    assert backend.faults.calls == calls
    assert kv.stats().committed_bytes == 2 * layout.groups[0].heap_bytes


def test_a_refused_buffer_is_not_opened() -> None:
    kv, _ = small_manager(faults=MemoryFaults(fail_at=1))
    assert not join(kv, 1, 1)
    assert join(kv, 1, 1)
    kv.check_invariants()


def test_a_map_that_can_be_neither_finished_nor_undone_ends_serving() -> None:
    # A buffer, two heaps, and a run of blocks in each: the second run is refused.
    kv, backend = small_manager(at_once=False, faults=MemoryFaults(fail_at=5, stuck_rate=1.0))
    tokens = kv.max_tokens
    assert join(kv, 1, tokens)
    with pytest.raises(BackendFailedError, match="over 20 s"):
        kv.reserve(1, tokens)
    assert backend.faults.calls == 5


def test_mappings_are_counted_by_blocks_and_those_of_the_past_go_again() -> None:
    kv, backend = small_manager()
    ids = [7] * 64
    assert join(kv, 1, ids)
    grow(kv, 1, 0, 64, ids)
    settle(kv, backend)
    assert (kv.stats().mapped_blocks, kv.stats().unmapped_blocks) == (4, 0)
    assert kv.stats().block_bytes == BLOCK
    assert kv.stats().block_tokens == TOKENS
    assert kv.stats().shared_saved_bytes == 0
    assert join(kv, 2, ids)
    stats = kv.stats()
    assert stats.mapped_blocks == 7, "all but the block of the last token"
    assert stats.shared_saved_bytes == 3 * BLOCK
    for seq in (1, 2):
        kv.close(seq)
    settle(kv, backend)
    stats = kv.stats()
    assert stats.mapped_blocks == stats.unmapped_blocks == 7
    assert stats.shared_saved_bytes == 0


def test_a_refused_mapping_is_counted_only_as_far_as_it_was_there() -> None:
    kv, backend = small_manager(sequences=2)
    assert join(kv, 1, 1, final=64)
    assert join(kv, 2, 1, final=64)
    grow(kv, 1, 0, 1)
    grow(kv, 2, 0, 1)
    before = kv.stats().mapped_blocks
    backend.faults.fail_at = backend.faults.calls + 1
    assert not kv.reserve(1, 64)
    kv.check_invariants()
    assert kv.stats().mapped_blocks - kv.stats().unmapped_blocks == before


def test_other_models_get_the_memory_of_idle_prefixes_but_not_what_one_sequence_may_need() -> None:
    kv, backend = small_manager(heaps=4)
    tokens = 2 * HEAP_BLOCKS * TOKENS
    assert join(kv, 1, tokens)
    grow(kv, 1, 0, tokens)
    kv.close(1)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 2 * HEAP_BLOCKS * BLOCK
    least = min(kv._layout.blocks_for(kv._layout.max_tokens), 4 * HEAP_BLOCKS) * BLOCK
    assert kv.set_limit(0) == kv.stats().capacity_bytes == least
    settle(kv, backend)
    kv.check_invariants()
    assert kv.max_tokens == min(kv._layout.max_tokens, least // BLOCK * TOKENS)
    assert kv.set_limit(1 << 60) == 4 * HEAP_BLOCKS * BLOCK


def test_a_limit_takes_nothing_from_those_who_run() -> None:
    kv, _ = small_manager(heaps=4)
    assert join(kv, 1, 3 * TOKENS)
    grow(kv, 1, 0, 3 * TOKENS)
    assert join(kv, 2, 5 * TOKENS)
    kv.set_limit(0)
    grow(kv, 2, 0, 5 * TOKENS)
    kv.check_invariants()
