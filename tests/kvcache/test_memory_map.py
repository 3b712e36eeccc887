from array import array

from kvcache.memory_map import BlockRun, BlockState
from tests.kvcache.managers import (
    BLOCK,
    HEAP_BLOCKS,
    TOKENS,
    complete_steps,
    grow,
    join,
    settle,
    small_manager,
)
from tests.kvcache.maps import map_adds_up

PROMPT = list(range(3 * TOKENS))


def test_an_empty_pool_has_its_measures_and_no_blocks() -> None:
    kv, _ = small_manager(heaps=3)
    found = kv.memory_map()
    assert (found.block_bytes, found.tokens_per_block) == (BLOCK, TOKENS)
    assert (found.blocks_per_heap, found.max_heaps) == (HEAP_BLOCKS, 3)
    assert (found.page_bytes, found.regions) == (4096, 2)
    assert not found.heaps
    assert not found.sequences
    map_adds_up(found, kv.stats())


def test_a_sequence_is_told_with_its_blocks_and_those_of_others() -> None:
    kv, backend = small_manager()
    assert join(kv, 7, PROMPT, final=60)
    grow(kv, 7, 0, len(PROMPT), PROMPT)
    complete_steps(kv)
    assert join(kv, 9, PROMPT, final=50)
    found = kv.memory_map()
    first, second = found.sequences
    assert (first.seq_id, first.sealed_blocks, first.borrowed_blocks) == (7, 3, 0)
    # With the one that is mapped ahead.
    assert first.runs == (BlockRun(0, 0, 4),)
    # The last token is always computed: the block that it is in is not taken over.
    assert (second.seq_id, second.borrowed_blocks, second.mapped_blocks) == (9, 2, 2)
    assert second.runs == (BlockRun(0, 0, 2),)
    assert array("H", found.heaps[0].sharers)[:3].tolist() == [2, 2, 1]
    assert set(found.heaps[0].states[:3]) == {BlockState.SEALED}
    map_adds_up(found, kv.stats())
    kv.close(7)
    kv.close(9)
    assert BlockState.QUARANTINED in kv.memory_map().heaps[0].states
    map_adds_up(kv.memory_map(), kv.stats())
    settle(kv, backend)
    assert BlockState.CACHED in kv.memory_map().heaps[0].states


def test_a_map_stays_as_it_was_when_the_pool_goes_on() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 20)
    grow(kv, 1, 0, 20)
    before = kv.memory_map()
    figures = kv.stats()
    grow(kv, 1, 20, 30)
    assert kv.memory_map() != before
    map_adds_up(before, figures)
