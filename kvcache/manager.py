"""The KV cache in sequence ids and token counts: scheduler and runner see no blocks.

A sequence that begins like another one maps the other's sealed blocks instead of computing them.
"""

from collections.abc import Sequence

from kvcache.backend import PageBackend, Releases, Segment
from kvcache.block_allocator import MAP_AHEAD_TOKENS, BlockAllocator
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.inspector import CacheInspector
from kvcache.layout import KVLayout
from kvcache.memory_budget import CacheLimits
from kvcache.memory_map import KVMap, take_map
from kvcache.prefix_cache import Match, PrefixCache
from kvcache.prefix_index import MissReason
from kvcache.sequences import CachedSequence, ClosedSequence, Progress
from kvcache.sparse_heap import BlockState
from kvcache.stats import KVStats
from kvcache.views import CacheTokens, KVViews, layer_regions

BLOCKS_EVICTED_AT_ONCE = 4096  # 30 ms of a Python thread


class KVCacheManager:
    """Keeps sequences, buffers and blocks together. Engine thread only."""

    def __init__(
        self, layout: KVLayout, backend: PageBackend, limits: CacheLimits, *, identity: bytes
    ) -> None:
        """identity: of the model; what one model computed is never shared with another."""
        self._group = layout.group
        self._backend = backend
        self._limits = limits
        self._identity = identity + repr(layout).encode()
        self._pool = HeapPool(self._group, backend, limits.budget_bytes)
        # Twice as many buffers as sequences: one that leaves need not be unmapped before the next
        # one joins.
        self._buffers = BufferPool(self._group, backend, 2 * limits.max_sequences)
        self._prefixes = PrefixCache(
            self._pool,
            max_sharers=limits.settings.max_sharers,
            enabled=limits.settings.prefix_cache and backend.shares_blocks,
        )
        parts = self._group, self._pool, self._buffers, self._prefixes
        self._allocator = BlockAllocator(*parts)
        self._inspector = CacheInspector(*parts, backend)
        self._layers = layer_regions(layout)
        self._tokens = CacheTokens(len(self._layers))
        self._open: dict[int, CachedSequence] = {}
        self._closed: list[ClosedSequence] = []
        self.releases_memory = backend.releases is not Releases.NOTHING
        """Whether memory can be released to the system before the process ends."""
        self._issued_epoch = self._completed_epoch = 0

    # --- the scheduler's side: joining ----------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Return how many tokens one sequence can ever have: its addresses and the whole pool."""
        pool_tokens = self._pool.capacity_blocks * self._group.tokens_per_block
        return min(self._group.max_tokens, pool_tokens)

    def block_hashes(self, salt: PrefixSalt) -> BlockHashes:
        """Return the empty block hashes of a new sequence."""
        return BlockHashes(self._identity, salt, self._group.tokens_per_block)

    def open(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        *,
        final_tokens: int,
        system_tokens: int = 0,
    ) -> Progress | None:
        """Give the sequence a buffer, map the cached blocks that it begins with, and set blocks
        aside for ``num_tokens``, so that reserving them cannot fail for want of blocks.

        final_tokens: the most that it will need. system_tokens: how many of the first ones are a
        system prompt. Return its progress, which the cache keeps while it is open; None, with
        nothing changed, when it does not fit now.
        """
        assert seq_id not in self._open, f"sequence {seq_id} is open"
        if len(self._open) == self._limits.max_sequences or num_tokens > self._group.max_tokens:
            return None
        needed = self._group.blocks_for(num_tokens)
        if needed - block_hashes.shareable_blocks > self._allocator.available_blocks:
            return None
        system = system_tokens // self._group.tokens_per_block
        nothing, longest = Match([], 0), self._prefixes.match(block_hashes, 0)
        # A prefix in more pieces than the system has mappings for is computed again.
        for match in (longest, nothing) if longest.blocks else (nothing,):
            buffer = self._buffers.take() if self._fits(needed, match) else None
            if buffer is None:
                continue
            sequence = CachedSequence(seq_id, buffer, block_hashes, needed, final_tokens, system)
            self._allocator.add(sequence)
            if self._allocator.attach(sequence, match.blocks):
                self._open[seq_id] = sequence
                return sequence.progress
            self._allocator.remove(sequence)
            self._buffers.free(buffer)
        return None

    def attach_cached(self, seq_id: int) -> int:
        """Map what others have sealed of the sequence's tokens meanwhile. Return how many of its
        tokens have valid K and V."""
        sequence = self._open[seq_id]
        if self._prefixes.can_share_next(sequence):
            match = self._prefixes.match(sequence.block_hashes, len(sequence.buffer.table))
            self._allocator.attach(sequence, match.blocks)
        return sequence.progress.computed

    def fork(self, seq_id: int, child_id: int) -> int:
        """Give a child with the same prompt all of its parent's K and V but the last token's: share
        sealed blocks, copy the partial one. Return how many of its tokens have valid K and V; no
        more than before while the parent's are not sealed."""
        parent, child = self._open[seq_id], self._open[child_id]
        num_tokens = child.block_hashes.num_tokens - 1
        whole, partial = divmod(num_tokens, self._group.tokens_per_block)
        progress = child.progress
        has_all = parent.progress.computed >= num_tokens and parent.sealed >= whole
        if not has_all or not child.all_sealed:
            return progress.computed
        own, parents = child.buffer.table.blocks, parent.buffer.table.blocks[:whole]
        blocks = parents[len(own) :]
        # The child may have begun with blocks of a sequence that has failed since.
        at_limit = any(map(self._prefixes.has_max_sharers, blocks))
        if (blocks and parents[: len(own)] != own) or at_limit:
            return progress.computed
        shared = self._allocator.attach(child, blocks)
        if shared and partial and self.reserve(child_id, num_tokens):
            source, target = parent.buffer.number, child.buffer.number
            self._backend.copy_block(source, whole, target, whole, partial)
            progress.restart_at(num_tokens)
        return progress.computed

    def add_pending_prefix(self, seq_id: int) -> None:
        """Let others wait for the blocks that the sequence is going to compute."""
        self._prefixes.add_pending_prefix(self._open[seq_id])

    def pending_owner(self, seq_id: int) -> int | None:
        """Return the sequence that will compute this one's next blocks, if those can be shared."""
        return self._prefixes.pending_owner(self._open[seq_id])

    def explain(self, seq_id: int) -> tuple[int, MissReason | None]:
        """Return the token at which the sequence left the longest cached prefix, and why it shares
        no more; None when no more could be shared."""
        return self._prefixes.explain(self._open[seq_id])

    # --- growing and leaving --------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Map memory for tokens [0, num_tokens). All or nothing: False leaves no trace."""
        sequence = self._open[seq_id]
        return num_tokens <= sequence.mapped_tokens or self._allocator.grow(sequence, num_tokens)

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Note that the next ``len(token_ids)`` positions hold valid K and V of these tokens."""
        sequence = self._open[seq_id]
        start = sequence.progress.computed
        end = start + len(token_ids)
        sequence.block_hashes.extend(token_ids, start)
        epoch = sequence.commit(end)
        size = self._group.tokens_per_block
        for number in range(start // size, end // size):
            self._prefixes.filled(epoch, sequence, number)

    def cancel_steps(self, seq_id: int) -> None:
        """Cancel the sequence's steps that have not committed."""
        self._open[seq_id].cancel_steps()

    def close(self, seq_id: int, *, keep_prefix: bool = True) -> None:
        """Close the sequence. Its blocks wait for the newest step that may touch them. keep_prefix:
        whether what it wrote may be shared from now on."""
        sequence = self._open.pop(seq_id)
        sequence.keeps_prefix = keep_prefix
        self._allocator.remove(sequence)
        self._prefixes.close(sequence)
        self._closed.append(ClosedSequence(sequence, self._issued_epoch))

    @property
    def recovering(self) -> bool:
        """Return whether blocks or mappings of closed sequences are not free yet."""
        return bool(self._closed) or self._pool.count(BlockState.RELEASING) > 0

    # --- the runner's side ----------------------------------------------------------------------

    def views(self, plan: Sequence[tuple[int, int, int]]) -> KVViews:
        """Return what a step reads and writes: ``(seq_id, start, count)`` in the order of its rows,
        segments of one row first. Opens the next epoch."""
        segments: list[Segment] = []
        growing: list[tuple[CachedSequence, int, int]] = []
        epoch = self._issued_epoch + 1
        for seq_id, start, count in plan:
            sequence = self._open[seq_id]
            assert start == sequence.next_start, f"{seq_id}: {start} != {sequence.next_start}"
            sequence.schedule(end := start + count, epoch)
            segments.append(Segment(sequence.buffer.number, start, count))
            if end + max(count, MAP_AHEAD_TOKENS) > sequence.table_tokens:
                growing.append((sequence, end, count))
        self._allocator.next_step()
        views = KVViews(self._layers, self._tokens, self._backend, segments, epoch)
        self._issued_epoch = epoch
        for sequence, end, count in growing:
            self._allocator.map_ahead(sequence, end, count)
        return views

    def step_completed(self, completed_epoch: int) -> None:
        """Note that the device has finished all steps up to that epoch; free what waited for it."""
        assert completed_epoch <= self._issued_epoch
        before = self._completed_epoch, len(self._closed)
        self._completed_epoch = max(self._completed_epoch, completed_epoch)
        self._advance()
        # After failed attempts to map blocks nothing is released: while the system refuses to map
        # them, the cache would seem to recover for ever.
        changed = (self._completed_epoch, len(self._closed)) != before
        if changed and self._backend.releases is not Releases.IDLE:
            self._allocator.release_memory(self._limits.settings.free_slack_bytes)

    def release_idle_memory(self) -> None:
        """Release memory of free blocks, but for one heap's. Nothing runs or waits."""
        self._advance()
        self._allocator.release_memory(0)

    def evict_prefixes(self) -> None:
        """Evict prefixes that no sequence uses: so few at a time that no step has to wait."""
        for _ in range(BLOCKS_EVICTED_AT_ONCE):
            if not self._prefixes.evict():
                break
        runs = self._open or self._completed_epoch < self._issued_epoch
        if not runs or self._backend.releases is not Releases.IDLE:
            self._allocator.release_memory(self._limits.settings.free_slack_bytes)

    def set_memory_pressure(self, *, short: bool) -> None:
        """Note whether the system is short of memory."""
        self._allocator.keeps_slack = not short
        self._allocator.spares_heaps = short and not self.releases_memory

    def shut_down(self) -> bool:
        """End the device's memory in order: nothing may be called afterwards. False where the
        device did not answer: then the process must end without releasing anything."""
        return self._backend.shut_down()

    # --- statistics -----------------------------------------------------------------------------

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes of K and V were copied from block to block."""
        return self._backend.copied_bytes

    @property
    def mapping_waits(self) -> int:
        """Return how many steps had to wait for a mapping."""
        return self._allocator.mapping_waits

    def stats(self) -> KVStats:
        """Return a snapshot; the parts add up to the capacity exactly."""
        return self._inspector.stats(self._open.values())

    def memory_map(self) -> KVMap:
        """Return what every block is for, and which sequences have it."""
        return take_map(self._group, self._pool, self._open.values())

    def check_invariants(self) -> None:
        """Check that every block, buffer and byte is accounted for. Raises AssertionError."""
        sequences = list(self._open.values())
        self._inspector.check_invariants(sequences, [item.sequence for item in self._closed])
        self._allocator.check_invariants(sequences)

    # --- inside ---------------------------------------------------------------------------------

    def _fits(self, needed: int, match: Match) -> bool:
        """Return whether there are blocks and mappings for a sequence with this cached prefix."""
        own = needed - len(match.blocks)
        if own + match.num_cached > self._allocator.available_blocks:
            return False
        # For a sequence alone, the system itself decides whether it may have so many mappings.
        return not self._open or self._buffers.has_room_for(own, match.blocks)

    def _advance(self) -> None:
        """Seal full blocks. Move closed buffers on: epoch passed -> unmapping -> free."""
        self._prefixes.seal(self._completed_epoch)
        done = self._backend.completed_ticket()
        still_closed = []
        for closed in self._closed:
            buffer = closed.sequence.buffer
            if closed.ticket is None and closed.epoch <= self._completed_epoch and buffer.table:
                closed.ticket = self._buffers.unmap(buffer)
            if buffer.table and (closed.ticket is None or closed.ticket > done):
                still_closed.append(closed)
                continue
            self._prefixes.cache_or_free(buffer.table.blocks)
            self._buffers.free(buffer)
        self._closed = still_closed
        self._pool.poll(done)
