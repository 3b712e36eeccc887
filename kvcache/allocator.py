"""Gives memory blocks to open sequences and maps the blocks in the sequences' buffers."""

from collections.abc import Collection

from kvcache.buffers import BufferPool
from kvcache.evictor import EVICTED_AT_ONCE
from kvcache.layout import Group
from kvcache.pool import HeapPool
from kvcache.prefixes import PrefixCache
from kvcache.records import Block, BlockState
from kvcache.sequences import SequenceBlocks

# A decoding sequence's next block is mapped this many tokens early. The blocks for a prompt's next
# chunk are mapped while a chunk is computed.
MAP_AHEAD_TOKENS = 8
# A mapping point is a moment at which no step runs. There, memory is mapped for this many tokens
# ahead if a sequence has less than half as much. So all sequences need the next mapping point at
# about the same time.
MAP_AHEAD_AT_POINT_TOKENS = 128
# Up to this share of all blocks is mapped ahead even if that evicts cached prefixes.
MAPPED_AHEAD_RATIO = 1 / 8
# The most bytes to release at once. Releasing this many delays mappings by 40 ms.
BYTES_RELEASED_AT_ONCE = 256 * 1024**2
# If ``spares_heaps`` is True and heaps fill this share of the budget, cached prefixes are evicted
# before another heap is made.
SPARED_HEAPS_RATIO = 0.5


class BlockAllocator:
    """Maps blocks in the buffers of open sequences, and keeps enough blocks for reservations."""

    def __init__(
        self,
        group: Group,
        pool: HeapPool,
        buffers: BufferPool,
        prefixes: PrefixCache,
        *,
        maps_while_running: bool,
        sequence_blocks: int,
    ) -> None:
        """``sequence_blocks`` is the most blocks that any sequence needs at one time."""
        self.sequence_blocks = sequence_blocks
        self._group = group
        self._pool = pool
        self._buffers = buffers
        self._prefixes = prefixes
        self._num_sequences = 0
        self._maps_while_running = maps_while_running
        self.is_at_mapping_point = True
        self.wants_mapping_point = False
        """True if blocks were refused only because mappings may not change while a step runs."""
        self.has_waited = False
        """True if a step had to wait for a mapping. KVCacheManager resets the flag."""
        self.keeps_slack = True
        """True if free blocks keep their memory (up to a limit) for the next sequences."""
        self.spares_heaps = False
        """True if cached prefixes are evicted before a heap is made, because heaps cannot be
        released."""

    @property
    def available_blocks(self) -> int:
        """The number of free and cached blocks that no sequence has reserved."""
        cached = self._pool.count(BlockState.CACHED)
        return self._pool.free_blocks + cached - self._buffers.reserved_blocks

    def add(self, own: SequenceBlocks, end: int) -> None:
        """Add a sequence, and reserve blocks for its places before ``end``, but no more than it
        needs at one time."""
        self._num_sequences += 1
        self._buffers.reserve(own.buffer, end, self.sequence_blocks)

    def adjust(self, own: SequenceBlocks) -> None:
        """Reserve as many of the blocks that a sequence needs as are available, after it has let go
        of blocks that others keep, or has got blocks of others."""
        buffer = own.buffer
        spare = self.available_blocks + buffer.reserved_blocks
        most_held = min(self.sequence_blocks, len(buffer.held) + spare)
        self._buffers.reserve(buffer, buffer.reservation, most_held)

    def remove(self, own: SequenceBlocks) -> None:
        """Remove a sequence and its reservation, after waiting for its queued mappings."""
        self._settle(own)
        self._num_sequences -= 1
        self._buffers.reserve(own.buffer, 0, 0)

    @property
    def may_map(self) -> bool:
        return self._maps_while_running or self.is_at_mapping_point

    def ask_to_map(self) -> bool:
        """Return True if mappings may change now. Else ask for a mapping point."""
        self.wants_mapping_point = self.wants_mapping_point or not self.may_map
        return self.may_map

    def map_shared(self, own: SequenceBlocks, blocks: list[Block]) -> bool:
        """Map other sequences' sealed blocks read-only. Return False if the system refuses, or if
        mappings may not change because a step runs."""
        if not self.may_map and own.buffer.count_premapped(blocks) < len(blocks):
            self.wants_mapping_point = True
            return False
        fits = len(blocks) <= self._buffers.places_left(own.buffer)
        return not blocks or (fits and self._buffers.map(own.buffer, blocks, writable=False))

    def grow(self, own: SequenceBlocks, num_tokens: int) -> bool:
        """Map the missing blocks for tokens [0, num_tokens). Return False and map nothing if too
        few blocks are available, or if mappings may not change now."""
        buffer, needed = own.buffer, self._group.blocks_for(num_tokens)
        if num_tokens > self._group.max_tokens:
            return False
        self.has_waited = self.has_waited or not self._buffers.is_settled(buffer)
        self._settle(own)
        missing = needed - buffer.table.end
        if missing <= 0:
            return True
        places = self._buffers.places_left(buffer)
        if missing > places or missing - buffer.reserved_blocks > self.available_blocks:
            return False
        if not self.may_map and len(buffer.usable_premapped(missing)) < missing:
            self.wants_mapping_point = True
            return False
        self.has_waited = self.has_waited or self.may_map
        blocks = self._take(own, missing)
        if blocks is None:
            return False
        if self._buffers.map(buffer, blocks, writable=True):
            return True
        self._pool.free_unmapped(blocks)
        return False

    def map_ahead(self, own: SequenceBlocks, end: int, count: int) -> None:
        """Start mapping blocks for later steps. The current one computes the ``count`` tokens
        before ``end``. Take unreserved blocks only if one per open sequence stays available."""
        buffer = own.buffer
        ahead = min(end + max(count, MAP_AHEAD_TOKENS), own.sequence.final_tokens)
        missing = self._group.blocks_for(ahead) - buffer.table.end
        if missing > buffer.reserved_blocks + self.available_blocks - self._num_sequences:
            missing = min(missing, buffer.reserved_blocks)
        missing = min(missing, self._buffers.places_left(buffer))
        if missing <= 0 or buffer.pending:
            return
        blocks = self._take(own, missing)
        if blocks is not None and not self._buffers.map_ahead(buffer, blocks):
            self._pool.free_unmapped(blocks)

    def top_up(self, own: SequenceBlocks, end: int) -> None:
        """While no step runs, map all reserved blocks of the sequence. Also map blocks for many
        tokens after ``end``, but leave them free (premapped)."""
        reserved = own.buffer.table.end + own.buffer.reserved_blocks
        self.grow(own, min(reserved * self._group.tokens_per_block, self._group.max_tokens))
        spare = self._spare_blocks(own, end)
        blocks = self._take(own, spare) if spare else None
        if blocks is not None:
            self._buffers.map(own.buffer, blocks, writable=True)
            self._pool.free_unmapped(self._buffers.unmap_last(own.buffer, spare))

    def _spare_blocks(self, own: SequenceBlocks, end: int) -> int:
        """Return the number of free blocks to map ahead of need, or 0 if enough are mapped."""
        buffer, size = own.buffer, self._group.tokens_per_block
        ahead = min(end + MAP_AHEAD_AT_POINT_TOKENS, own.sequence.final_tokens)
        wanted = self._group.blocks_for(ahead) - buffer.table.end
        premapped = len(buffer.usable_premapped(wanted)) if wanted > 0 else 0
        has = (buffer.table.end + premapped) * size
        if has >= min(end + MAP_AHEAD_AT_POINT_TOKENS // 2, own.sequence.final_tokens):
            return 0
        all_premapped = self._pool.premapped_blocks
        few = round(MAPPED_AHEAD_RATIO * self._pool.capacity_blocks) - all_premapped
        free = self._pool.takeable_blocks if self.spares_heaps else self._pool.free_blocks
        room = min(wanted - premapped, max(few, free - all_premapped))
        room = min(room, self.available_blocks - premapped - self._num_sequences)
        room = min(room, self._buffers.places_left(buffer) - premapped)
        return premapped + room if room > 0 else 0

    def set_limit(self, blocks: int) -> int:
        """Set the limit of used blocks, and evict cached prefixes to meet it. Return the limit in
        effect, which may be higher: the blocks in use or reserved, one full sequence, and the
        memory that the backend cannot release must each fit."""
        cached = self._pool.count(BlockState.CACHED)
        held = self._pool.used_blocks - cached + self._buffers.reserved_blocks
        least = max(blocks, held, self.sequence_blocks)
        self._prefixes.evict(min(self._pool.used_blocks - least, EVICTED_AT_ONCE))
        return self._pool.set_limit(least)

    def release_memory(self, slack_bytes: int) -> None:
        """Release free memory, except ``slack_bytes`` (at least one heap) and reserved blocks."""
        kept_bytes = max(slack_bytes if self.keeps_slack else 0, self._group.heap_bytes)
        kept_bytes += self._buffers.reserved_blocks * self._group.block_bytes
        if not self._pool.has_more_than(kept_bytes):
            return  # after nearly every step
        at_once = max(BYTES_RELEASED_AT_ONCE, self._group.heap_bytes) // self._group.block_bytes
        at_once -= self._pool.count(BlockState.RELEASING)
        cached = self._pool.count(BlockState.CACHED)
        unreserved = self._pool.unused_blocks + cached - self._buffers.reserved_blocks
        self._buffers.unmap_all_free()
        self._pool.release_memory(kept_bytes, min(unreserved, at_once))

    def _settle(self, own: SequenceBlocks) -> None:
        """Wait for queued mappings, and free the blocks that the system refused to map."""
        self._pool.free_unmapped(self._buffers.settle(own.buffer))

    def _take(self, own: SequenceBlocks, count: int) -> list[Block] | None:
        """Take free blocks. Prefer those that the sequence's buffer maps already, then those next
        to the sequence's last block. Evict cached blocks if too few are free."""
        while self._pool.free_blocks < count:
            evicted = self._prefixes.evict()
            assert evicted, "more blocks are promised than there are"
        premapped = own.buffer.usable_premapped(count)
        for block in premapped:
            self._pool.take_premapped(block)
        if len(premapped) == count:
            return premapped
        blocks = premapped or own.blocks
        others = self._take_others(count - len(premapped), blocks[-1] if blocks else None)
        if others is None:
            self._pool.free_unmapped(premapped)
            return None
        return premapped + others

    def _take_others(self, count: int, after: Block | None) -> list[Block] | None:
        if self.spares_heaps:
            self._spare_a_heap(count)
        while (taken := self._pool.allocate(count, after)) is None:
            if not self._make_room(count):
                return None
        return taken

    def _make_room(self, count: int) -> bool:
        """Make blocks available in the first way that is possible: unmap free blocks of idle
        buffers, evict cached blocks, or unmap free blocks of buffers in use. Return False if none
        is possible."""
        if self._buffers.unmap_free(idle=True):
            return True
        missing = max(1, count - self._pool.takeable_blocks)
        return self._prefixes.evict(missing) > 0 or self._buffers.unmap_free(idle=False)

    def _spare_a_heap(self, count: int) -> None:
        """Evict cached prefixes and unmap free blocks, if that makes a further heap unnecessary."""
        blocks = len(self._pool.heaps) * self._group.blocks_per_heap
        missing = count - self._pool.count(BlockState.FREE)
        is_large = blocks >= SPARED_HEAPS_RATIO * self._pool.capacity_blocks
        if is_large and missing <= self._pool.count(BlockState.CACHED):
            self._prefixes.evict(missing)
            while self._pool.takeable_blocks < count and self._buffers.unmap_free(idle=False):
                pass

    def check_invariants(self, sequences: Collection[SequenceBlocks]) -> None:
        assert self._num_sequences == len(sequences)
        assert self.available_blocks >= 0, "more blocks are reserved than there are"
