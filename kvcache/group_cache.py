"""The cache of one group of layers: its blocks, buffers and prefixes, and their statistics."""

from collections import Counter
from collections.abc import Collection

from kvcache.backend import Charge, PageBackend, Releases
from kvcache.block import Block, BlockState, SparseBuffer
from kvcache.block_allocator import BlockAllocator
from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.layout import Group
from kvcache.memory_budget import CacheLimits
from kvcache.prefix_cache import PrefixCache
from kvcache.sequences import CachedSequence, ClosedSequence
from kvcache.stats import KVStats


class GroupCache:
    """The cache of a group: the layers whose K and V rows have the same shape."""

    def __init__(
        self, group: Group, backend: PageBackend, limits: CacheLimits, max_heaps: int
    ) -> None:
        self.group = group
        self.backend = backend
        self.pool = HeapPool(group, backend, max_heaps * group.heap_bytes)
        self.buffers = BufferPool(group, self.pool, backend, limits)
        self.prefixes = PrefixCache(
            self.pool,
            max_sharers=limits.settings.max_sharers,
            enabled=limits.settings.prefix_cache and backend.shares_blocks,
        )
        self._keeps_mappings = not backend.maps_while_running
        self.allocator = BlockAllocator(
            group,
            self.pool,
            self.buffers,
            self.prefixes,
            maps_while_running=backend.maps_while_running,
        )
        self.closed: list[ClosedSequence] = []

    def take_buffer(self, needed: int, prefix: list[Block], *, alone: bool) -> SparseBuffer | None:
        """Take a buffer for a sequence of ``needed`` blocks that begins with the cached blocks
        ``prefix``. Return None if blocks, mappings or buffers run out. ``alone`` means that no
        sequence is open."""
        own = needed - len(prefix)
        cached = sum(block.state is BlockState.CACHED for block in prefix)
        if own + cached > self.allocator.available_blocks:
            return None
        # If no sequence is open, skip the estimate: only the system's own limit counts then.
        if not alone and not self.buffers.has_room_for(own, prefix):
            return None
        return self.buffers.take(prefix)

    def blocks_to_fork(
        self, parent: CachedSequence, child: CachedSequence, whole: int
    ) -> list[Block] | None:
        """Return the parent's blocks before index ``whole`` that the child lacks. Return None if
        they cannot be shared, or if the child's own blocks differ from the parent's."""
        if parent.sealed_blocks < whole or not child.all_sealed:
            return None
        own, parents = child.buffer.table.blocks, parent.buffer.table.blocks[:whole]
        blocks = parents[len(own) :]
        # The child may have taken equal blocks from a third sequence, before that sequence failed.
        if blocks and parents[: len(own)] != own:
            return None
        return None if any(map(self.prefixes.has_max_sharers, blocks)) else blocks

    def close(self, sequence: CachedSequence, epoch: int) -> None:
        """Close a sequence. The sequence's blocks can be freed after step ``epoch`` has
        completed."""
        self.allocator.remove(sequence)
        self.prefixes.close(sequence)
        self.closed.append(ClosedSequence(sequence, epoch))

    @property
    def recovering(self) -> bool:
        """True if blocks or mappings of closed sequences will still become free."""
        return bool(self.closed) or self.pool.count(BlockState.RELEASING) > 0

    def advance(self, completed_epoch: int) -> None:
        """Seal full blocks. Unmap the blocks of closed sequences whose last step has completed, and
        free the sequences' buffers. If mappings may not change while steps run, leave the blocks
        mapped."""
        self.prefixes.seal(completed_epoch)
        done = self.backend.completed_ticket()
        still_closed = []
        for closed in self.closed:
            buffer = closed.sequence.buffer
            if self._keeps_mappings:
                if closed.epoch <= completed_epoch:
                    self.prefixes.cache_or_free(self.buffers.leave_mapped(buffer))
                else:
                    still_closed.append(closed)
                continue
            if closed.ticket is None and closed.epoch <= completed_epoch and buffer.table:
                closed.ticket = self.buffers.unmap(buffer)
            if buffer.table and (closed.ticket is None or closed.ticket > done):
                still_closed.append(closed)
                continue
            self.prefixes.cache_or_free(buffer.table.blocks)
            self.buffers.free(buffer)
        self.closed = still_closed
        self.pool.poll(done)

    @property
    def may_release(self) -> bool:
        """True if memory may be released now although sequences are open."""
        if self._keeps_mappings:
            return self.allocator.is_at_mapping_point
        return self.backend.releases is not Releases.IDLE

    def stats(self, sequences: Collection[CachedSequence]) -> KVStats:
        """Return statistics that count each shared block once. ``sequences`` are all open ones."""
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
            num_heaps=len(pool.heaps),
            kept_heaps=len(pool.heaps) if self.backend.releases is Releases.NOTHING else 0,
            num_sequences=len(sequences),
            block_bytes=group.block_bytes,
            block_tokens=size,
            shared_saved_bytes=pool.saved_blocks * group.block_bytes,
            evicted_blocks=self.prefixes.evicted_blocks,
            mapped_blocks=self.buffers.mapped_blocks,
            unmapped_blocks=self.buffers.unmapped_blocks,
            late_signals=self.backend.late_signals,
        )

    def check_invariants(self, sequences: list[CachedSequence]) -> None:
        all_sequences = [*sequences, *(closed.sequence for closed in self.closed)]
        self.buffers.check_invariants([s.buffer for s in all_sequences])
        self.prefixes.check_invariants(sequences)
        self.pool.check_invariants()
        users = Counter(b for s in sequences for b in s.buffer.table.blocks)
        buffers = Counter(b for s in all_sequences for b in s.buffer.table.blocks)
        findable = 0
        for block in self.pool.blocks():
            assert block.sequences == users[block], f"{block}: sequences"
            assert block.buffers == buffers[block], f"{block}: buffers"
            _check_block(block)
            findable += block.prefix is not None
        assert findable == len(self.prefixes.index)
        for sequence in sequences:
            _check_sequence(self.group, sequence)
        self.allocator.check_invariants(sequences)
        self._check_charge(self.stats(sequences))

    def _check_charge(self, stats: KVStats) -> None:
        charged = stats.capacity_bytes - stats.free_bytes + stats.free_slack_bytes
        if self.backend.charge is not Charge.BLOCKS:
            charged = stats.num_heaps * self.group.heap_bytes
        assert stats.committed_bytes <= charged, f"{stats.committed_bytes} committed, not {charged}"


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
