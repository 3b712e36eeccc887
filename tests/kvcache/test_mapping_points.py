"""Memory whose mappings change only while no step is in flight, as a Metal device's should."""

from typing import Any

import pytest

from kvcache.allocator import MAP_AHEAD_AT_POINT_TOKENS
from kvcache.backends.backend import BackendFailedError, Releases
from kvcache.manager import KVCacheManager
from tests.kvcache.managers import (
    HEAP_BLOCKS,
    TOKENS,
    complete_steps,
    epochs_of,
    grow,
    join,
    paged,
    small_manager,
)
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory

PROMPT = list(range(100, 100 + 3 * TOKENS + 5))


def cache(**changes: Any) -> tuple[KVCacheManager, StrictMemory]:
    """A cache on a device that releases nothing, unless the changes say so."""
    fields: dict[str, Any] = {
        "releases": Releases.NOTHING,
        "maps_while_running": False,
    }
    return small_manager(paged(max_tokens=1024), **fields | changes)


def finish_steps(kv: KVCacheManager, backend: StrictMemory) -> None:
    """A mapping point: every step that was begun has completed."""
    backend.completed_epoch, _ = epochs_of(kv)
    complete_steps(kv)
    kv.check_invariants()


def answer(kv: KVCacheManager, backend: StrictMemory, seq_id: int, ids: list[int]) -> None:
    """A whole life of a sequence, alone."""
    assert join(kv, seq_id, ids)
    shared = kv.attach_cached(seq_id)
    grow(kv, seq_id, shared, len(ids) - shared, ids)
    finish_steps(kv, backend)
    kv.close(seq_id)
    complete_steps(kv)
    kv.check_invariants()


def test_nothing_is_mapped_while_a_step_is_in_flight() -> None:
    kv, backend = cache(heaps=8)
    assert join(kv, 1, 16, final=1000)
    grow(kv, 1, 0, 16)
    assert not kv.reserve(1, 500)
    assert kv.wants_mapping_point
    finish_steps(kv, backend)
    assert not kv.wants_mapping_point
    assert kv.reserve(1, 500)
    kv.views([(1, 16, 1)])
    assert backend.points == 2


def test_what_a_draft_needs_is_mapped_before_a_pass_of_the_head() -> None:
    kv, backend = cache(heaps=8)
    assert join(kv, 1, 16, final=1000)
    grow(kv, 1, 0, 16)
    finish_steps(kv, backend)
    assert kv.reserve(1, 300, 3)
    kv.preview([(1, 16)])
    assert backend.points == 2
    backend.completed_epoch = backend.opened_epoch
    assert kv.reserve(1, 500), "the point goes on behind the pass"
    kv.views([(1, 16, 4)], {1: 3})
    assert backend.points == 3


def test_a_sequence_decodes_long_before_it_needs_the_next_point() -> None:
    kv, backend = cache(heaps=8)
    assert join(kv, 1, 16, final=1000)
    grow(kv, 1, 0, 16)
    for start in range(16, 16 + MAP_AHEAD_AT_POINT_TOKENS):
        assert kv.reserve(1, start + 1), f"{start} tokens"
        kv.views([(1, start, 1)])
        kv.commit(1, [1])
    assert not kv.reserve(1, 17 + MAP_AHEAD_AT_POINT_TOKENS)
    assert backend.points == 1


def test_sequences_are_topped_up_together() -> None:
    kv, backend = cache(heaps=16)
    for seq in (1, 2):
        assert join(kv, seq, 16, final=1000)
        grow(kv, seq, 0, 16)
        finish_steps(kv, backend)
    begun = backend.begun
    start = 16 + MAP_AHEAD_AT_POINT_TOKENS - 8
    for seq in (1, 2):
        assert kv.reserve(seq, start)
    kv.views([(seq, 16, start - 16) for seq in (1, 2)])
    assert backend.begun > begun, "there are only eight tokens left, and this is a point"
    for seq in (1, 2):
        assert kv.reserve(seq, start + MAP_AHEAD_AT_POINT_TOKENS // 2)


def test_all_of_a_prompt_is_mapped_at_one_point() -> None:
    kv, backend = cache(heaps=16)
    assert join(kv, 1, 900, final=1000)
    assert kv.reserve(1, 100)
    kv.views([(1, 0, 100)])
    assert kv.reserve(1, 900)
    assert backend.points == 1


def test_what_is_mapped_ahead_is_everybodys() -> None:
    kv, backend = cache(heaps=3)
    assert join(kv, 1, 16, final=1000)
    grow(kv, 1, 0, 16)
    finish_steps(kv, backend)
    others = 2 * HEAP_BLOCKS * TOKENS
    assert len(backend.mapped) > 4
    assert join(kv, 2, others)
    assert kv.reserve(2, others)
    kv.views([(2, 0, others)])
    kv.check_invariants()
    assert kv.stats().unmapped_blocks > 0


def test_whoever_comes_back_to_its_buffer_needs_no_mapping() -> None:
    kv, backend = cache(heaps=8)
    answer(kv, backend, 1, PROMPT)
    assert join(kv, 2, 16, final=500)
    grow(kv, 2, 0, 16)
    begun = backend.begun
    assert join(kv, 3, PROMPT), "although a step is in flight"
    assert kv.attach_cached(3) == 3 * TOKENS
    assert kv.reserve(3, len(PROMPT))
    kv.views([(3, 3 * TOKENS, 5)])
    assert backend.begun == begun
    assert backend.points == 2


def test_a_prefix_of_others_is_shared_at_the_next_point() -> None:
    kv, backend = cache(heaps=8)
    answer(kv, backend, 1, PROMPT)
    assert join(kv, 2, PROMPT), "this one has taken the buffer"
    grow(kv, 2, 3 * TOKENS, 5, PROMPT)
    assert not join(kv, 3, PROMPT)
    assert kv.wants_mapping_point
    finish_steps(kv, backend)
    assert join(kv, 3, PROMPT)
    assert kv.attach_cached(3) == 3 * TOKENS
    kv.check_invariants()


def test_a_buffer_that_keeps_what_others_may_want_is_the_last_to_be_taken() -> None:
    kv, backend = cache(heaps=8)
    answer(kv, backend, 1, PROMPT)
    answer(kv, backend, 2, [7] * 40)
    unmapped = kv.stats().unmapped_blocks
    assert unmapped == 0
    answer(kv, backend, 3, PROMPT)
    assert kv.stats().unmapped_blocks == 0


def test_no_more_buffers_are_made_for_kept_prefixes_than_sequences_and_one() -> None:
    kv, backend = cache(heaps=8, sequences=2)
    for seq in range(1, 7):
        answer(kv, backend, seq, [seq] * 40)
        assert backend.buffers == min(seq, 3)
    assert kv.stats().evicted_blocks == 0, "what is cached is not lost with its mapping"


def test_a_kept_block_is_unmapped_before_another_sequence_gets_it() -> None:
    kv, backend = cache(heaps=2)
    answer(kv, backend, 1, PROMPT)
    everything = 2 * HEAP_BLOCKS * TOKENS
    assert join(kv, 2, everything)
    assert kv.reserve(2, everything), "what was kept behind the other buffer as well"
    kv.views([(2, 0, everything)])
    kv.check_invariants()
    assert kv.stats().unmapped_blocks == 4
    assert kv.stats().evicted_blocks == 3


def test_what_is_evicted_beside_a_step_is_unmapped_at_the_next_point() -> None:
    kv, backend = cache(heaps=2, releases=Releases.IDLE)
    answer(kv, backend, 1, PROMPT)
    assert join(kv, 2, 16)
    grow(kv, 2, 0, 16)
    kv.evict_prefixes()
    kv.check_invariants()
    assert kv.stats().evicted_blocks == 3
    assert kv.stats().unmapped_blocks == 0
    finish_steps(kv, backend)
    assert kv.stats().unmapped_blocks == 4


def test_a_sealed_block_is_never_written_through_the_mapping_that_is_kept() -> None:
    kv, backend = cache(heaps=8)
    answer(kv, backend, 1, PROMPT)
    kv.evict_prefixes()
    unmapped = kv.stats().unmapped_blocks
    answer(kv, backend, 2, [7] * len(PROMPT))
    assert kv.stats().unmapped_blocks == unmapped + 4, "it was mapped anew"


def test_a_block_that_is_kept_everywhere_is_unmapped_for_one_more_sharer() -> None:
    kv, backend = cache(heaps=8, max_sharers=2)
    answer(kv, backend, 1, PROMPT)
    assert join(kv, 2, PROMPT)
    assert kv.attach_cached(2) == 3 * TOKENS
    assert join(kv, 3, PROMPT)
    for seq in (2, 3):
        grow(kv, seq, 3 * TOKENS, 5, PROMPT)
        finish_steps(kv, backend)
        kv.close(seq)
    complete_steps(kv)
    kv.check_invariants()
    assert join(kv, 4, [*PROMPT[: 2 * TOKENS], *[9] * 40])
    assert kv.attach_cached(4) == 2 * TOKENS
    kv.check_invariants()


def test_empty_heaps_are_released_at_a_mapping_point_and_get_their_memory_back() -> None:
    kv, backend = cache(heaps=4, releases=Releases.IDLE)
    heap = HEAP_BLOCKS * TOKENS
    assert join(kv, 2, 10, final=20)
    grow(kv, 2, 0, 10)
    finish_steps(kv, backend)
    assert join(kv, 1, 3 * heap - TOKENS)
    assert kv.reserve(1, 3 * heap - TOKENS)
    kv.views([(1, 0, 3 * heap - TOKENS)])
    kv.commit(1, [1] * (3 * heap - TOKENS))
    finish_steps(kv, backend)
    assert not backend.released
    kv.close(1, keep_prefix=False)
    grow(kv, 2, 10, 1)
    kv.step_completed(epochs_of(kv)[0] - 1)
    assert not backend.released, "a step is in flight"
    finish_steps(kv, backend)
    backend.complete()
    finish_steps(kv, backend)
    assert {number for number, _, _ in backend.released}
    assert kv.stats().committed_bytes < 4 * kv._layout.heap_bytes
    assert kv.stats().num_sequences == 1
    grow(kv, 2, 11, 1)
    finish_steps(kv, backend)
    assert join(kv, 3, 2 * heap)
    assert kv.reserve(3, 2 * heap)
    kv.views([(3, 0, 2 * heap)])
    kv.check_invariants()


def test_a_heap_that_the_system_refuses_leaves_no_trace() -> None:
    kv, backend = cache(heaps=2, faults=MemoryFaults(fail_at=3))  # a buffer, a heap, its memory
    assert join(kv, 1, 16)
    assert not kv.reserve(1, 16)
    kv.check_invariants()
    assert not kv.wants_mapping_point
    assert kv.reserve(1, 16)
    kv.views([(1, 0, 16)])
    assert len(backend.mapped) == 1


def test_a_mapping_that_never_ends_ends_serving() -> None:
    kv, _ = cache(heaps=2, faults=MemoryFaults(stuck_rate=1.0))
    assert join(kv, 1, 16)
    assert kv.reserve(1, 16)
    with pytest.raises(BackendFailedError):
        kv.views([(1, 0, 16)])


def test_a_fork_takes_its_parents_blocks_at_a_mapping_point() -> None:
    kv, backend = cache(heaps=8)
    assert join(kv, 1, PROMPT, final=300)
    grow(kv, 1, 0, len(PROMPT), PROMPT)
    finish_steps(kv, backend)
    kv.reserve(1, len(PROMPT) + 1)
    grow(kv, 1, len(PROMPT), 1)
    assert not join(kv, 2, PROMPT)
    finish_steps(kv, backend)
    assert join(kv, 2, PROMPT)
    assert kv.fork(1, 2) == len(PROMPT) - 1
    assert backend.copies == 1
    kv.check_invariants()


def test_under_memory_pressure_free_blocks_are_unmapped_before_a_heap_is_made() -> None:
    kv, backend = cache(heaps=2)
    answer(kv, backend, 1, PROMPT)
    kv.set_memory_pressure(short=True)
    assert join(kv, 2, 4 * TOKENS)
    assert kv.reserve(2, 4 * TOKENS)
    assert backend.heaps == 1
    kv.check_invariants()
