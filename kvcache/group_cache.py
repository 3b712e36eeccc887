"""One group's part of the cache: its blocks, its buffers and its prefixes."""

from kvcache.backend import PageBackend, Releases
from kvcache.block import Block, BlockState
from kvcache.block_allocator import BlockAllocator
from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.inspector import CacheInspector
from kvcache.layout import Group
from kvcache.memory_budget import CacheLimits
from kvcache.prefix_cache import PrefixCache
from kvcache.sequences import CachedSequence, ClosedSequence
from kvcache.sparse_buffer import SparseBuffer
from kvcache.stats import KVStats


class GroupCache:
    """What the manager does, in one group."""

    def __init__(
        self, group: Group, backend: PageBackend, limits: CacheLimits, max_heaps: int
    ) -> None:
        """max_heaps: what the budget allows."""
        self.group = group
        self.backend = backend
        self.pool = HeapPool(group, backend, max_heaps * group.heap_bytes)
        # Twice as many buffers as sequences: one that leaves need not be unmapped before the next
        # one joins.
        max_sharers = limits.settings.max_sharers
        self.buffers = BufferPool(group, self.pool, backend, 2 * limits.max_sequences, max_sharers)
        self.prefixes = PrefixCache(
            self.pool,
            max_sharers=max_sharers,
            enabled=limits.settings.prefix_cache and backend.shares_blocks,
        )
        parts = group, self.pool, self.buffers, self.prefixes
        self._keeps_mappings = not backend.maps_while_running
        self.allocator = BlockAllocator(*parts, maps_while_running=backend.maps_while_running)
        self._inspector = CacheInspector(*parts, backend)
        self._closed: list[ClosedSequence] = []

    # --- joining --------------------------------------------------------------------------------

    def take_buffer(self, needed: int, prefix: list[Block], *, alone: bool) -> SparseBuffer | None:
        """Return a buffer for a sequence with this cached prefix; None where blocks, mappings or
        buffers are missing. needed: its blocks. alone: whether no other sequence is open."""
        own = needed - len(prefix)
        cached = sum(block.state is BlockState.CACHED for block in prefix)
        if own + cached > self.allocator.available_blocks:
            return None
        # For a sequence alone, the system itself decides whether it may have so many mappings.
        if not alone and not self.buffers.has_room_for(own, prefix):
            return None
        return self.buffers.take(prefix)

    def blocks_to_fork(
        self, parent: CachedSequence, child: CachedSequence, whole: int
    ) -> list[Block] | None:
        """Return which of the parent's first ``whole`` blocks its child is to attach; None where
        they are not sealed yet, or the child cannot go on with them."""
        if parent.sealed_blocks < whole or not child.all_sealed:
            return None
        own, parents = child.buffer.table.blocks, parent.buffer.table.blocks[:whole]
        blocks = parents[len(own) :]
        # The child may have begun with blocks of a sequence that has failed since.
        if blocks and parents[: len(own)] != own:
            return None
        return None if any(map(self.prefixes.has_max_sharers, blocks)) else blocks

    # --- leaving --------------------------------------------------------------------------------

    def close(self, sequence: CachedSequence, epoch: int) -> None:
        """Close a sequence: its blocks wait for that epoch."""
        self.allocator.remove(sequence)
        self.prefixes.close(sequence)
        self._closed.append(ClosedSequence(sequence, epoch))

    @property
    def num_closed(self) -> int:
        """Return how many closed sequences' buffers are not free yet."""
        return len(self._closed)

    @property
    def recovering(self) -> bool:
        """Return whether blocks or mappings of closed sequences are not free yet."""
        return bool(self._closed) or self.pool.count(BlockState.RELEASING) > 0

    def advance(self, completed_epoch: int) -> None:
        """Seal full blocks. Move closed buffers on: epoch passed -> unmapping -> free; or, where
        mappings stay, epoch passed -> free."""
        self.prefixes.seal(completed_epoch)
        done = self.backend.completed_ticket()
        still_closed = []
        for closed in self._closed:
            buffer = closed.sequence.buffer
            if self._keeps_mappings:
                if closed.epoch <= completed_epoch:
                    self.prefixes.cache_or_free(self.buffers.keep(buffer))
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
        self._closed = still_closed
        self.pool.poll(done)

    def evict(self, max_blocks: int) -> None:
        """Evict prefixes that no sequence uses, up to so many blocks."""
        for _ in range(max_blocks):
            if not self.prefixes.evict():
                break

    @property
    def may_release(self) -> bool:
        """Return whether memory may be released now, though sequences are open: at any time, or
        only at mapping points. Where neither, it is released while there are none."""
        if self._keeps_mappings:
            return self.allocator.is_at_mapping_point
        return self.backend.releases is not Releases.IDLE

    # --- statistics -----------------------------------------------------------------------------

    def stats(self, sequences: list[CachedSequence]) -> KVStats:
        """Return a snapshot. sequences: all open ones."""
        return self._inspector.stats(sequences)

    def check_invariants(self, sequences: list[CachedSequence]) -> None:
        """Check that every block, buffer and byte is accounted for. sequences: all open ones.
        Raises AssertionError."""
        self._inspector.check_invariants(sequences, [item.sequence for item in self._closed])
        self.allocator.check_invariants(sequences)
