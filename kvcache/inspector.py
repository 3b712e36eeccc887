"""Counts what the blocks are for, in bytes, and checks that everything adds up."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvcache.backend import Charge, PageBackend, Releases
from kvcache.block import Block, BlockState
from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.layout import Group
from kvcache.prefix_cache import PrefixCache
from kvcache.sequences import CachedSequence
from kvcache.stats import KVStats


@dataclass(frozen=True, slots=True)
class CacheInspector:
    """Reads the cache's parts, and changes none of them."""

    group: Group
    pool: HeapPool
    buffers: BufferPool
    prefixes: PrefixCache
    backend: PageBackend

    def stats(self, sequences: Collection[CachedSequence]) -> KVStats:
        """Return a snapshot. A block that many sequences share counts once. sequences: all open
        ones."""
        group, pool = self.group, self.pool
        size = group.tokens_per_block
        sealed = pool.count(BlockState.SEALED)
        own_tokens = [max(0, s.progress.scheduled - s.sealed_blocks * size) for s in sequences]
        used = sum(group.blocks_for(tokens) for tokens in own_tokens)
        live_bytes = (sealed * size + sum(own_tokens)) * group.bytes_per_token
        waiting = pool.count(BlockState.QUARANTINED) + pool.count(BlockState.RELEASING)
        return KVStats(
            capacity_bytes=pool.capacity_blocks * group.block_bytes,
            free_bytes=pool.free_blocks * group.block_bytes,
            live_bytes=live_bytes,
            partial_tail_bytes=(sealed + used) * group.block_bytes - live_bytes,
            mapped_ahead_bytes=(pool.count(BlockState.OWNED) - used) * group.block_bytes,
            cached_bytes=pool.count(BlockState.CACHED) * group.block_bytes,
            quarantined_bytes=waiting * group.block_bytes,
            free_slack_bytes=pool.free_committed_bytes,
            committed_bytes=self.backend.committed_bytes(),
            num_heaps=pool.num_heaps,
            kept_heaps=pool.num_heaps if self.backend.releases is Releases.NOTHING else 0,
            num_sequences=len(sequences),
            block_bytes=group.block_bytes,
            block_tokens=size,
            shared_saved_bytes=pool.saved_blocks * group.block_bytes,
            evicted_blocks=self.prefixes.evicted_blocks,
            mapped_blocks=self.buffers.mapped_blocks,
            unmapped_blocks=self.buffers.unmapped_blocks,
        )

    def check_invariants(
        self, open_sequences: Sequence[CachedSequence], closed_sequences: Sequence[CachedSequence]
    ) -> None:
        """Count again which sequences and buffers have which block. Raises AssertionError."""
        all_sequences = [*open_sequences, *closed_sequences]
        self.buffers.check_invariants([s.buffer for s in all_sequences])
        self.prefixes.check_invariants(open_sequences)
        self.pool.check_invariants()
        sequences = Counter(b for s in open_sequences for b in s.buffer.table.blocks)
        buffers = Counter(b for s in all_sequences for b in s.buffer.table.blocks)
        findable = 0
        for block in blocks_of(self.pool):
            assert block.sequences == sequences[block], f"{block}: sequences"
            assert block.buffers == buffers[block], f"{block}: buffers"
            _check_block(block)
            findable += block.prefix is not None
        assert findable == len(self.prefixes.index)
        for sequence in open_sequences:
            _check_sequence(self.group, sequence)
        self._check_charge(self.stats(open_sequences))

    def _check_charge(self, stats: KVStats) -> None:
        """Check that the system charges for no more than the pool has taken of it."""
        charged = stats.capacity_bytes - stats.free_bytes + stats.free_slack_bytes
        if self.backend.charge is not Charge.BLOCKS:
            charged = stats.num_heaps * self.group.heap_bytes
        assert stats.committed_bytes <= charged, f"{stats.committed_bytes} committed, not {charged}"


def blocks_of(pool: HeapPool) -> Iterator[Block]:
    for heap in pool.heaps:
        yield from heap.blocks


def _check_block(block: Block) -> None:
    state = block.state
    if state is BlockState.OWNED:
        assert block.sequences == block.buffers == 1, f"{block} is written by {block.sequences}"
    elif state is BlockState.SEALED:
        assert block.sequences, f"{block} is sealed, and no sequence has it"
    elif state is BlockState.QUARANTINED:
        assert block.buffers, f"{block} waits for nothing"
        assert not block.sequences
    else:
        assert not block.buffers, f"{block} is {state.name} and mapped"
    if block.prefix is None:
        assert state is not BlockState.CACHED, f"{block} is cached, and cannot be found"
    else:
        findable = {BlockState.SEALED, BlockState.QUARANTINED, BlockState.CACHED}
        assert state in findable, f"{block} is {state.name} and can be found"


def _check_sequence(group: Group, sequence: CachedSequence) -> None:
    blocks = sequence.buffer.table.blocks
    mapped = sequence.buffer.mapped_blocks * group.tokens_per_block
    sealed_blocks = sequence.sealed_blocks
    sealed = sealed_blocks * group.tokens_per_block
    progress = sequence.progress
    assert sealed <= progress.computed <= progress.scheduled <= mapped
    assert sequence.shared_blocks <= sealed_blocks, "a block of others may still be written"
    for number, block in enumerate(blocks):
        expected = BlockState.SEALED if number < sealed_blocks else BlockState.OWNED
        assert block.state is expected, f"{sequence.seq_id}: block {number}"
