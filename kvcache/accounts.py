"""The books: what the blocks are for, in bytes, and whether everything is accounted for."""

from collections import Counter
from collections.abc import Collection, Iterable

from kvcache.backend import PageBackend, Releases
from kvcache.heap_pool import HeapPool
from kvcache.layout import Group
from kvcache.prefix_index import PrefixIndex
from kvcache.sequences import CachedSequence
from kvcache.sparse_heap import BlockRef, BlockState
from kvcache.stats import KVStats


def stats(
    group: Group, pool: HeapPool, backend: PageBackend, sequences: Collection[CachedSequence]
) -> KVStats:
    """A snapshot; a block that many sequences share counts once."""
    size = group.tokens_per_block
    sealed = pool.count(BlockState.SEALED)
    own_tokens = [max(0, s.planned - s.sealed * size) for s in sequences]
    used = sum(group.blocks_for(tokens) for tokens in own_tokens)
    live_bytes = (sealed * size + sum(own_tokens)) * group.bytes_per_token
    waiting = pool.count(BlockState.QUARANTINED) + pool.count(BlockState.RETURNING)
    return KVStats(
        capacity_bytes=pool.capacity_blocks * group.block_bytes,
        free_bytes=pool.available_blocks * group.block_bytes,
        live_bytes=live_bytes,
        partial_tail_bytes=(sealed + used) * group.block_bytes - live_bytes,
        mapped_ahead_bytes=(pool.count(BlockState.OWNED) - used) * group.block_bytes,
        cached_bytes=pool.count(BlockState.CACHED) * group.block_bytes,
        quarantined_bytes=waiting * group.block_bytes,
        free_slack_bytes=pool.free_committed_bytes,
        committed_bytes=backend.committed_bytes(),
        num_heaps=pool.num_heaps,
        kept_heaps=pool.num_heaps if backend.releases is Releases.NOTHING else 0,
        num_sequences=len(sequences),
    )


def check(
    group: Group,
    pool: HeapPool,
    index: PrefixIndex,
    open_sequences: Collection[CachedSequence],
    closed_sequences: Iterable[CachedSequence],
) -> None:
    """Recounts who has which block. Raises AssertionError."""
    pool.check_invariants()
    sequences = Counter(b for s in open_sequences for b in s.buffer.table.blocks)
    buffers = sequences + Counter(b for s in closed_sequences for b in s.buffer.table.blocks)
    for block in pool.blocks():
        state = pool.state(block)
        assert pool.num_sequences(block) == sequences[block], f"{block}: sequences"
        assert pool.num_buffers(block) == buffers[block], f"{block}: buffers"
        _check_block(block, BlockState(state), sequences[block], buffers[block], index)
    for sequence in open_sequences:
        _check_sequence(group, pool, sequence)


def _check_block(
    block: BlockRef, state: BlockState, sequences: int, buffers: int, index: PrefixIndex
) -> None:
    entry = index.at(block)
    if state == BlockState.OWNED:
        assert sequences == buffers == 1, f"{block} is written by {sequences}"
    elif state == BlockState.SEALED:
        assert sequences, f"{block} is sealed, and nobody has it"
    elif state == BlockState.QUARANTINED:
        assert buffers, f"{block} waits for nothing"
        assert not sequences
    else:
        assert not buffers, f"{block} is {state.name} and mapped"
    findable = {BlockState.SEALED, BlockState.QUARANTINED, BlockState.CACHED}
    assert entry is None or state in findable, f"{block} is {state.name} and can be found"
    if entry is not None:
        assert entry.idle == (state == BlockState.CACHED)
    assert entry is not None or state != BlockState.CACHED, f"{block} is cached for nobody"


def _check_sequence(group: Group, pool: HeapPool, sequence: CachedSequence) -> None:
    blocks = sequence.buffer.table.blocks
    mapped = sequence.buffer.mapped_blocks * group.tokens_per_block
    sealed = sequence.sealed * group.tokens_per_block
    assert sealed <= sequence.computed <= sequence.planned <= mapped
    assert sequence.borrowed <= sequence.sealed, "a block of others may still be written"
    for number, block in enumerate(blocks):
        expected = BlockState.SEALED if number < sequence.sealed else BlockState.OWNED
        assert pool.state(block) == expected, f"{sequence.seq_id}: block {number}"
