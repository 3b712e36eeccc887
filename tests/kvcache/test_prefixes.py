"""Sharing as the scheduler sees it: through the manager's door, over a backend that knows what a
sharing mistake is."""

from collections.abc import Sequence

import pytest

from kvcache.backends.backend import Releases
from kvcache.block_hashes import PrefixSalt
from kvcache.manager import KVCacheManager
from kvcache.stats import MissReason
from tests.kvcache.managers import (
    BLOCK,
    TOKENS,
    blocks_of,
    complete_steps,
    grow,
    join,
    settle,
    small_manager,
)
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory

IDS = list(range(100, 164))  # four blocks


def write(
    kv: KVCacheManager, seq_id: int, ids: Sequence[int], salt: PrefixSalt | None = None
) -> None:
    """A sequence computes all of its prompt that it does not share, and the steps complete."""
    assert join(kv, seq_id, ids, salt=salt)
    start = kv.attach_cached(seq_id)
    kv.step_completed(grow(kv, seq_id, start, len(ids) - start, ids))


def test_a_sealed_block_is_shared_while_its_writer_runs() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:40])
    assert join(kv, 2, IDS[:48])
    assert kv.attach_cached(2) == 32
    assert blocks_of(kv, 2)[:2] == blocks_of(kv, 1)[:2]
    assert backend.committed_bytes() == 3 * BLOCK, "nothing new"
    assert backend.copied_bytes == 0
    grow(kv, 2, 32, 16, IDS)


def test_a_block_is_not_shared_before_its_step_has_completed() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, IDS[:32])
    epoch = grow(kv, 1, 0, 32, IDS)
    assert join(kv, 2, IDS[:40])
    assert kv.attach_cached(2) == 0
    kv.step_completed(epoch)
    assert kv.attach_cached(2) == 32


def test_a_prompt_that_is_cached_whole_computes_its_last_token() -> None:
    kv, _ = small_manager()
    write(kv, 1, IDS[:32])
    assert join(kv, 2, IDS[:32])
    assert kv.attach_cached(2) == 16, "a sealed block is never written"
    assert join(kv, 3, IDS[:33])
    assert kv.attach_cached(3) == 32


def test_blocks_of_a_sequence_that_left_are_kept_and_found() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:40])
    kv.close(1)
    settle(kv, backend)
    assert backend.mapped == {}
    stats = kv.stats()
    assert (stats.cached_bytes, stats.live_bytes) == (2 * BLOCK, 0)
    assert join(kv, 2, IDS)
    assert kv.attach_cached(2) == 32
    assert kv.stats().cached_bytes == 0
    kv.check_invariants()


def test_blocks_that_wait_for_their_unmapping_are_found_as_well() -> None:
    kv, backend = small_manager(at_once=False)
    write(kv, 1, IDS[:32])
    kv.close(1)
    complete_steps(kv)
    assert kv.stats().quarantined_bytes == 2 * BLOCK
    assert join(kv, 2, IDS)
    assert kv.attach_cached(2) == 32
    kv.check_invariants()
    settle(kv, backend)
    assert kv.stats().live_bytes == 2 * BLOCK


def test_blocks_that_were_filled_by_the_last_step_are_kept_although_their_writer_left() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, IDS[:32])
    grow(kv, 1, 0, 32, IDS)
    kv.close(1)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 2 * BLOCK


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, IDS[:10], final=32)
    kv.step_completed(grow(kv, 1, 0, 10, IDS))
    for place in range(10, 32):
        kv.step_completed(grow(kv, 1, place, 1, IDS))
    assert join(kv, 2, IDS[:40])
    assert kv.attach_cached(2) == 32


def test_a_block_that_many_share_counts_once() -> None:
    kv, _ = small_manager(sequences=8)
    write(kv, 1, IDS[:32])
    one = kv.stats().live_bytes
    for seq in range(2, 8):
        assert join(kv, seq, IDS[:33])
    assert kv.stats().live_bytes == one
    kv.check_invariants()


def test_other_salts_share_nothing() -> None:
    kv, _ = small_manager()
    write(kv, 1, IDS[:32], PrefixSalt(b"key"))
    assert join(kv, 2, IDS, salt=PrefixSalt(b"stranger"))
    assert kv.attach_cached(2) == 0


def test_a_missing_block_evicts_what_was_not_used_for_longest() -> None:
    kv, backend = small_manager(heaps=1)
    for seq, first in ((1, 0), (2, 16)):
        write(kv, seq, IDS[first : first + 16])
        kv.close(seq)
        settle(kv, backend)
    assert kv.stats().cached_bytes == 2 * BLOCK
    write(kv, 3, [7] * 48)
    assert kv.stats().cached_bytes == BLOCK
    kv.close(3)
    settle(kv, backend)
    assert join(kv, 4, IDS[16:40])
    assert kv.attach_cached(4) == 16, "the younger one is still there"
    assert join(kv, 5, IDS[:17])
    assert kv.explain(5) == (0, MissReason.EVICTED)


def test_cached_blocks_that_a_newcomer_takes_over_are_not_counted_as_free_as_well() -> None:
    kv, backend = small_manager(heaps=1)
    write(kv, 1, IDS[:48])
    kv.close(1)
    settle(kv, backend)
    assert join(kv, 2, IDS[:49]), "three cached blocks and the free one"
    assert not join(kv, 3, 1)
    assert kv.attach_cached(2) == 48
    kv.check_invariants()


def test_a_failed_sequence_leaves_nothing_that_it_wrote_to_be_found() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:16])
    write(kv, 2, IDS[:40])
    kv.close(2, keep_prefix=False)
    settle(kv, backend)
    assert join(kv, 3, IDS)
    assert kv.attach_cached(3) == 16, "what others wrote stays"


def test_what_follows_a_failed_sequences_blocks_cannot_be_found_either() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:32])
    write(kv, 2, IDS[:48])
    kv.close(2)
    settle(kv, backend)
    kv.close(1, keep_prefix=False)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 0
    assert join(kv, 3, IDS)
    assert kv.attach_cached(3) == 0


def test_blocks_filled_by_a_step_that_failed_its_sequence_are_never_found() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, IDS[:32])
    grow(kv, 1, 0, 32, IDS)
    kv.close(1, keep_prefix=False)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 0


def test_equal_blocks_of_two_writers_are_kept_once() -> None:
    kv, backend = small_manager()
    for seq in (1, 2):
        assert join(kv, seq, IDS[:32])
    for seq in (1, 2):
        grow(kv, seq, 0, 32, IDS)
    settle(kv, backend)
    kv.close(1)
    kv.close(2)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 2 * BLOCK


def test_whoever_has_a_block_of_its_own_does_not_go_on_with_others() -> None:
    kv, backend = small_manager()
    for seq in (1, 2):
        assert join(kv, seq, IDS)
    grow(kv, 1, 0, 32, IDS)
    grow(kv, 2, 0, 16, IDS)
    settle(kv, backend)
    assert kv.attach_cached(2) == 16


def test_a_block_computed_again_replaces_its_idle_equal() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:32])
    kv.close(1)
    settle(kv, backend)
    assert join(kv, 2, IDS[:10], final=32)
    kv.step_completed(grow(kv, 2, 0, 10, IDS))
    for place in range(10, 16):
        kv.step_completed(grow(kv, 2, place, 1, IDS))
    settle(kv, backend)
    assert kv.stats().cached_bytes == BLOCK, "its second block, behind a first one that is in use"
    assert join(kv, 3, IDS[:40])
    assert kv.attach_cached(3) == 32
    assert blocks_of(kv, 3)[0] == blocks_of(kv, 2)[0]


def test_nobody_waits_for_blocks_that_will_not_be_found() -> None:
    """A sequence that has computed blocks which another one has published publishes no more."""
    kv, backend = small_manager(heaps=4)
    for seq in (1, 2):
        assert join(kv, seq, IDS)
        kv.add_pending_prefix(seq)
    grow(kv, 2, 0, 16, IDS)
    settle(kv, backend)
    grow(kv, 1, 0, 16, IDS)
    settle(kv, backend)
    kv.close(2)
    settle(kv, backend)
    assert join(kv, 3, IDS)
    assert kv.attach_cached(3) == 16
    assert kv.pending_owner(3) is None


def test_nobody_waits_for_what_follows_a_failed_sequences_blocks() -> None:
    kv, _ = small_manager()
    write(kv, 1, IDS[:32])
    for seq in (2, 3):
        assert join(kv, seq, IDS)
    kv.add_pending_prefix(2)
    assert kv.pending_owner(3) == 2
    kv.close(1, keep_prefix=False)
    kv.check_invariants()
    assert kv.pending_owner(3) is None


def test_a_sequence_whose_blocks_cannot_be_found_has_no_pending_prefix() -> None:
    kv, _ = small_manager()
    write(kv, 1, IDS[:32])
    assert join(kv, 2, IDS)
    kv.close(1, keep_prefix=False)
    kv.add_pending_prefix(2)
    kv.check_invariants()
    assert not kv._pending


def test_nobody_waits_for_one_that_must_compute_what_others_may_have() -> None:
    kv, backend = small_manager(heaps=4)
    write(kv, 1, IDS[:32])
    reading = kv.block_hashes(PrefixSalt())
    reading.max_cached_tokens = 0
    reading.extend(IDS, 0)
    assert kv.open(2, reading, len(IDS), final_tokens=len(IDS))
    assert kv.attach_cached(2) == 0
    assert kv.explain(2)[1] is None
    kv.add_pending_prefix(2)
    assert join(kv, 3, IDS)
    assert kv.attach_cached(3) == 32
    assert kv.pending_owner(3) is None
    grow(kv, 2, 0, 48, IDS)
    settle(kv, backend)
    kv.check_invariants()
    kv.close(1)
    kv.close(2)
    kv.close(3)
    settle(kv, backend)
    kv.check_invariants()
    # A copy of what others have is found only where it is the only one.
    assert join(kv, 4, IDS)
    assert kv.attach_cached(4) == 32


def test_no_more_buffers_than_allowed_map_a_block() -> None:
    kv, _ = small_manager(max_sharers=2)
    write(kv, 1, IDS[:32])
    assert join(kv, 2, IDS[:33])
    assert kv.attach_cached(2) == 32
    assert join(kv, 3, IDS[:33])
    assert kv.attach_cached(3) == 0
    grow(kv, 3, 0, 33, IDS)


def test_a_system_that_refuses_to_map_a_prefix_lets_it_be_computed() -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:32])
    backend.faults.fail_at = backend.faults.calls + 2  # the buffer, then the blocks
    assert join(kv, 2, IDS)
    assert len(blocks_of(kv, 2)) == 0
    kv.check_invariants()
    assert kv.attach_cached(2) == 32, "another time it may be mapped"


def test_a_prefix_in_too_many_pieces_is_computed_again() -> None:
    """A request that fits without what is cached is not refused because of it."""
    regions = 2
    kv, backend = small_manager(heaps=3, mapping_limit=4 * regions)
    for seq in (1, 2):
        assert join(kv, seq, IDS[:64] if seq == 1 else [9] * 48)
    for start in (0, 16, 32):  # in turn, so that no two blocks of one are neighbours
        for seq, ids in ((1, IDS), (2, [9] * 48)):
            if kv.reserve(seq, start + 16):
                kv.views([(seq, start, 16)])
                kv.commit(seq, ids[start : start + 16])
    settle(kv, backend)
    kv.close(1)
    kv.close(2)
    settle(kv, backend)
    backend.mapping_limit = 2 * regions
    assert join(kv, 3, IDS[:40])
    kv.check_invariants()


def test_a_system_that_refuses_to_map_more_of_a_prefix_lets_it_be_computed() -> None:
    kv, backend = small_manager()
    assert join(kv, 2, IDS)
    write(kv, 1, IDS[:32])
    backend.faults.fail_at = backend.faults.calls + 1
    assert kv.attach_cached(2) == 0
    kv.check_invariants()
    assert kv.attach_cached(2) == 32


def test_a_cache_without_prefixes_keeps_and_finds_nothing() -> None:
    kv, backend = small_manager(shares_prefixes=False)
    write(kv, 1, IDS[:32])
    assert join(kv, 2, IDS)
    assert kv.attach_cached(2) == 0
    kv.add_pending_prefix(1)
    assert kv.pending_owner(2) is None
    kv.close(1)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 0


# --- waiting for what another computes -----------------------------------------------------------


def test_a_sequence_knows_who_computes_its_next_block() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, IDS)
    assert join(kv, 2, IDS[:40])
    assert kv.pending_owner(2) is None, "nobody has begun"
    kv.add_pending_prefix(1)
    assert kv.pending_owner(2) == 1
    assert kv.pending_owner(1) is None, "not even itself"
    kv.step_completed(grow(kv, 1, 0, 32, IDS))
    assert kv.attach_cached(2) == 32
    assert kv.pending_owner(2) is None, "what is left is no full block"


def test_a_sequence_waits_until_the_last_common_block_is_there() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, IDS)
    assert join(kv, 2, [*IDS[:48], 1, 2])
    kv.add_pending_prefix(1)
    assert kv.pending_owner(2) == 1
    kv.step_completed(grow(kv, 1, 0, 32, IDS))
    assert kv.pending_owner(2) == 1, "two of three blocks are there"
    kv.step_completed(grow(kv, 1, 32, 16, IDS))
    assert kv.pending_owner(2) is None
    assert kv.attach_cached(2) == 48


def test_a_sequence_that_leaves_computes_nothing_any_more() -> None:
    kv, _ = small_manager()
    for seq in (1, 2):
        assert join(kv, seq, IDS)
    kv.add_pending_prefix(1)
    kv.close(1)
    assert kv.pending_owner(2) is None
    kv.check_invariants()


def test_the_last_owner_of_a_pending_prefix_is_waited_for() -> None:
    kv, _ = small_manager()
    for seq in (1, 2):
        assert join(kv, seq, IDS)
        kv.add_pending_prefix(seq)
    assert kv.pending_owner(1) == 2
    kv.close(1)
    assert kv._pending, "whoever was overtaken leaves a later owner's entries alone"


# --- forks ---------------------------------------------------------------------------------------


def parent_and_child(prompt: int, **changes: object) -> tuple[KVCacheManager, StrictMemory]:
    kv, backend = small_manager(**changes)  # type: ignore[arg-type]
    write(kv, 1, IDS[:prompt])
    assert join(kv, 2, IDS[:prompt])
    return kv, backend


@pytest.mark.parametrize(("prompt", "copied"), [(40, 7), (32, 15), (33, 0)])
def test_a_fork_shares_sealed_blocks_and_copies_the_partial_one(prompt: int, copied: int) -> None:
    kv, backend = parent_and_child(prompt)
    assert kv.fork(1, 2) == prompt - 1, "the last token is computed again, for its logits"
    shared = (prompt - 1) // TOKENS
    assert blocks_of(kv, 1)[:shared] == blocks_of(kv, 2)[:shared]
    assert kv.copied_bytes == copied * backend.group.bytes_per_token
    grow(kv, 2, prompt - 1, 1, IDS)


def test_a_fork_waits_until_its_parent_has_computed_the_prompt() -> None:
    kv, _ = small_manager(heaps=4)
    prompt = list(range(40))
    assert join(kv, 1, prompt)
    assert join(kv, 2, prompt)
    grow(kv, 1, 0, 38, prompt)
    assert kv.fork(1, 2) == 0


def test_a_fork_waits_until_its_parents_blocks_are_sealed() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, IDS[:40])
    epoch = grow(kv, 1, 0, 40, IDS)
    assert join(kv, 2, IDS[:40])
    assert kv.fork(1, 2) == 0
    kv.step_completed(epoch)
    assert kv.fork(1, 2) == 39
    assert kv.fork(1, 2) == 39, "once"


def test_a_fork_shares_blocks_that_cannot_be_found() -> None:
    kv, backend = parent_and_child(40, shares_prefixes=False)
    assert kv.fork(1, 2) == 39
    assert backend.copied_bytes == 7 * backend.group.bytes_per_token
    kv.close(1)
    kv.close(2)
    settle(kv, backend)
    assert kv.stats().cached_bytes == 0


def test_a_fork_whose_own_block_is_not_sealed_waits_for_that_too() -> None:
    kv, backend = parent_and_child(20, max_sharers=1)
    assert kv.reserve(2, 16)
    backend.mapping_limit = 0  # nothing is mapped ahead
    epoch = grow(kv, 2, 0, 16, IDS)
    backend.mapping_limit = None
    assert kv.fork(1, 2) == 16
    kv.check_invariants()
    kv.step_completed(epoch)
    assert kv.fork(1, 2) == 19


def test_a_fork_that_began_with_blocks_of_a_failed_sequence_keeps_to_them() -> None:
    kv, _ = small_manager(heaps=4)
    for seq in (1, 2):
        assert join(kv, seq, IDS[:60])
    kv.step_completed(grow(kv, 1, 0, 16, IDS))
    assert kv.attach_cached(2) == 16
    kv.close(1, keep_prefix=False)
    assert join(kv, 3, IDS[:60])
    kv.step_completed(grow(kv, 3, 0, 60, IDS))
    assert kv.fork(3, 2) == 16
    kv.check_invariants()


def test_a_fork_respects_the_most_sharers() -> None:
    kv, _ = parent_and_child(40, shares_prefixes=False, max_sharers=1)
    assert kv.fork(1, 2) == 0


@pytest.mark.parametrize("call", [1, 2])
def test_a_fork_that_the_system_refuses_computes_the_rest(call: int) -> None:
    kv, backend = parent_and_child(40, shares_prefixes=False)
    backend.faults.fail_at = backend.faults.calls + call  # the shared blocks, or the partial one
    assert kv.fork(1, 2) == [0, 32][call - 1]
    kv.check_invariants()
    assert backend.copied_bytes == 0
    start = kv.attach_cached(2)
    grow(kv, 2, start, 40 - start, IDS)


# --- mapping ahead -------------------------------------------------------------------------------


def test_the_next_block_is_mapped_before_it_is_needed() -> None:
    kv, backend = small_manager(at_once=False)
    assert join(kv, 1, 10, final=100)
    grow(kv, 1, 0, 10)
    assert kv.mapping_waits == 1, "the first block"
    backend.complete()
    for place in range(10, 45):
        grow(kv, 1, place, 1)
        backend.complete()
    assert kv.mapping_waits == 1
    assert kv.stats().mapped_ahead_bytes == BLOCK


def test_a_step_that_comes_before_its_mapping_waits_and_is_counted() -> None:
    kv, backend = small_manager(at_once=False)
    assert join(kv, 1, 16, final=100)
    grow(kv, 1, 0, 16)
    assert kv.mapping_waits == 1
    assert (0, 1) not in backend.mapped, "on its way"
    grow(kv, 1, 16, 1)
    assert kv.mapping_waits == 2


def test_nothing_is_mapped_beyond_the_end_of_a_sequence() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, 16, final=16)
    grow(kv, 1, 0, 16)
    assert len(backend.mapped) == 1


def test_the_next_chunk_of_a_prompt_is_mapped_while_one_is_computed() -> None:
    kv, backend = small_manager()
    assert join(kv, 1, 64)
    grow(kv, 1, 0, 32)
    assert len(backend.mapped) == 4
    grow(kv, 1, 32, 32)
    assert kv.mapping_waits == 1


def test_a_refusal_ahead_of_need_costs_nothing_but_the_wait() -> None:
    kv, backend = small_manager(faults=MemoryFaults(refuse_ahead=True))
    assert join(kv, 1, 16, final=100)
    grow(kv, 1, 0, 16)
    grow(kv, 1, 16, 1)
    assert kv.mapping_waits == 2
    kv.check_invariants()
    grow(kv, 1, 17, 10)
    kv.close(1)
    settle(kv, backend)
    assert backend.mapped == {}


def test_nothing_is_mapped_ahead_where_the_mappings_are_spent() -> None:
    regions = 2
    kv, backend = small_manager(mapping_limit=2 * regions, releases=Releases.HEAPS)
    assert join(kv, 1, 16, final=200)
    grow(kv, 1, 0, 16)
    assert len(backend.mapped) == 2, "consecutive blocks need no further mapping"
    for place in range(16, 64):
        grow(kv, 1, place, 1)
    assert len(backend.mapped) == 4, "another heap would be another mapping"
    kv.check_invariants()


def test_nothing_is_mapped_ahead_when_others_may_need_the_last_blocks() -> None:
    kv, backend = small_manager(heaps=1)
    for seq in (1, 2, 3):
        assert join(kv, seq, TOKENS, final=200)
        grow(kv, seq, 0, TOKENS)
    assert len(backend.mapped) == 4, "the first did while there was one for everybody"


def test_the_heap_that_the_system_refuses_ahead_of_need_is_asked_for_again() -> None:
    kv, backend = small_manager(heaps=3)
    assert join(kv, 1, 64, final=200)
    backend.faults.fail_at = backend.faults.calls + 3  # heap, map, heap
    grow(kv, 1, 0, 64)
    assert backend.heaps == 1
    grow(kv, 1, 64, 1)
    assert backend.heaps == 2


@pytest.mark.parametrize("cached", [17, 32, 40, 48, 63])
def test_nobody_waits_for_a_sequence_that_left_however_often_it_was_added(cached: int) -> None:
    kv, backend = small_manager()
    write(kv, 1, IDS[:cached])
    backend.faults.fail_at = backend.faults.calls + 2  # the buffer, then the blocks
    assert join(kv, 2, IDS)
    kv.add_pending_prefix(2)
    assert kv.attach_cached(2) == cached // TOKENS * TOKENS
    kv.add_pending_prefix(2)
    kv.close(2)
    kv.check_invariants()


def test_prefixes_are_dropped_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.evictor.EVICTED_AT_ONCE", 2)
    kv, backend = small_manager()
    write(kv, 1, IDS[:48])
    kv.close(1)
    settle(kv, backend)
    for left in (1, 0):
        kv.evict_prefixes()
        assert kv.stats().cached_bytes == left * BLOCK
