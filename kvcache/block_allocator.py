"""Gives sequences blocks: reserved, shared, new, or mapped ahead of need."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvcache.block import Block, BlockState
from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.layout import Group
from kvcache.prefix_cache import PrefixCache
from kvcache.sequences import CachedSequence

# A block is mapped so many tokens before a decoding sequence needs it; a prompt's next chunk while
# the one before it is computed.
MAP_AHEAD_TOKENS = 8
# Memory is released on the thread that also maps ahead: 40 ms of its time.
BYTES_RELEASED_AT_ONCE = 256 * 1024**2
BLOCKS_EVICTED_AT_ONCE = 4096  # 30 ms of a Python thread
# Of the heaps that the budget allows: where heaps are to be spared and so many are made, prefixes
# that no sequence uses make room before the next one is.
SPARED_HEAPS_RATIO = 0.5


class BlockAllocator:
    """Puts blocks behind the buffers of open sequences. No block is reserved twice."""

    def __init__(
        self, group: Group, pool: HeapPool, buffers: BufferPool, prefixes: PrefixCache
    ) -> None:
        self._group = group
        self._pool = pool
        self._buffers = buffers
        self._prefixes = prefixes
        self._reserved_blocks = 0
        self._num_sequences = 0
        self.has_waited = False
        """Whether a mapping had to be waited for; whoever counts that sets it back."""
        self.keeps_slack = True
        """Whether memory of free blocks is kept for the next sequences, beyond one heap."""
        self.spares_heaps = False
        """Whether heaps are made for those alone that run: what is made can never be given back."""

    @property
    def available_blocks(self) -> int:
        """Return how many blocks are free or can be evicted, and are not reserved."""
        cached = self._pool.count(BlockState.CACHED)
        return self._pool.free_blocks + cached - self._reserved_blocks

    def add(self, sequence: CachedSequence) -> None:
        """Add a sequence: from now on its reservation counts."""
        self._num_sequences += 1
        self._reserved_blocks += sequence.reserved_blocks

    def remove(self, sequence: CachedSequence) -> None:
        """Remove a sequence and its reservation. Waits for what is being mapped for it."""
        self._settle(sequence)
        self._num_sequences -= 1
        self._reserved_blocks -= sequence.reserved_blocks

    def map_shared(self, sequence: CachedSequence, blocks: list[Block]) -> bool:
        """Map sealed blocks of others, for reading only; False when the system refuses."""
        with self._updating_counts(sequence):
            return not blocks or self._buffers.map(sequence.buffer, blocks, writable=False)

    def cut(self, sequence: CachedSequence, count: int) -> list[Block]:
        """Undo what has just been mapped: unmap the last ``count`` blocks, and return them."""
        with self._updating_counts(sequence):
            return self._buffers.unmap_last(sequence.buffer, count)

    def grow(self, sequence: CachedSequence, num_tokens: int) -> int | None:
        """Map memory that the sequence does not have yet, for tokens [0, num_tokens). Return how
        many blocks that was; None, with nothing mapped, where it cannot be."""
        buffer, needed = sequence.buffer, self._group.blocks_for(num_tokens)
        if num_tokens > self._group.max_tokens:
            return None
        self.has_waited = self.has_waited or not self._buffers.is_settled(buffer)
        self._settle(sequence)
        missing = needed - len(buffer.table)
        if missing <= 0:
            return 0
        if missing - sequence.reserved_blocks > self.available_blocks:
            return None
        self.has_waited = True
        blocks = self._take(sequence, missing)
        if blocks is None:
            return None
        with self._updating_counts(sequence):
            if self._buffers.map(buffer, blocks, writable=True):
                return missing
        self._pool.free_unmapped(blocks)
        return None

    def shrink(self, sequence: CachedSequence, count: int) -> None:
        """Undo a ``grow`` of so many blocks."""
        self._pool.free_unmapped(self.cut(sequence, count))

    def map_ahead(self, sequence: CachedSequence, end: int, count: int) -> None:
        """Start mapping what the steps after one of ``count`` tokens up to ``end`` will need. Take
        more blocks than are reserved only while there is one for every sequence."""
        buffer = sequence.buffer
        ahead = min(end + max(count, MAP_AHEAD_TOKENS), sequence.final_tokens)
        missing = self._group.blocks_for(ahead) - len(buffer.table)
        if missing > sequence.reserved_blocks + self.available_blocks - self._num_sequences:
            missing = min(missing, sequence.reserved_blocks)
        if missing <= 0 or buffer.pending:
            return
        blocks = self._take(sequence, missing)
        if blocks is None:
            return
        with self._updating_counts(sequence):
            if self._buffers.map_ahead(buffer, blocks):
                return
        self._pool.free_unmapped(blocks)

    def set_limit(self, blocks: int) -> int:
        """Allow so many blocks from now on, and what one sequence may need at least; evict prefixes
        that no sequence uses for it. Return how many are allowed: more, while sequences have them
        or where memory cannot be given back."""
        cached = self._pool.count(BlockState.CACHED)
        held = self._pool.used_blocks - cached + self._reserved_blocks
        least = max(blocks, held, self._group.blocks_for(self._group.max_tokens))
        for _ in range(min(self._pool.used_blocks - least, BLOCKS_EVICTED_AT_ONCE)):
            self._prefixes.evict()
        return self._pool.set_limit(least)

    def release_memory(self, slack_bytes: int) -> None:
        """Release memory of free blocks beyond the slack; keep a heap's, and as much as is
        reserved."""
        reserved_bytes = self._reserved_blocks * self._group.block_bytes
        slack_bytes = (
            max(slack_bytes if self.keeps_slack else 0, self._group.heap_bytes) + reserved_bytes
        )
        at_once = max(BYTES_RELEASED_AT_ONCE, self._group.heap_bytes) // self._group.block_bytes
        at_once -= self._pool.count(BlockState.RELEASING)
        cached = self._pool.count(BlockState.CACHED)
        unreserved = self._pool.unused_blocks + cached - self._reserved_blocks
        self._pool.release_memory(slack_bytes, min(unreserved, at_once))

    def _settle(self, sequence: CachedSequence) -> None:
        """Wait for blocks that are being mapped ahead; free those that the system refused."""
        with self._updating_counts(sequence):
            self._pool.free_unmapped(self._buffers.settle(sequence.buffer))

    def _take(self, sequence: CachedSequence, count: int) -> list[Block] | None:
        """Free blocks, if possible those behind the sequence's last one; evicts cached ones when
        there are not enough."""
        blocks = sequence.buffer.table.blocks
        after = blocks[-1] if blocks else None
        if self.spares_heaps:
            self._spare_a_heap(count)
        while (taken := self._pool.allocate(count, after)) is None:
            if not self._prefixes.evict():
                return None
        return taken

    def _spare_a_heap(self, count: int) -> None:
        """Evict prefixes that no sequence uses, where the heaps that are there have ``count`` free
        blocks then."""
        made = self._pool.num_heaps * self._group.blocks_per_heap
        missing = count - self._pool.count(BlockState.FREE)
        is_large = made >= SPARED_HEAPS_RATIO * self._pool.capacity_blocks
        if is_large and missing <= self._pool.count(BlockState.CACHED):
            for _ in range(missing):
                self._prefixes.evict()

    @contextmanager
    def _updating_counts(self, sequence: CachedSequence) -> Iterator[None]:
        """Update the counts after what changes the sequence's table."""
        before = sequence.reserved_blocks
        yield
        self._reserved_blocks += sequence.reserved_blocks - before
        sequence.mapped_tokens = sequence.buffer.mapped_blocks * self._group.tokens_per_block
        sequence.table_tokens = len(sequence.buffer.table) * self._group.tokens_per_block

    def check_invariants(self, sequences: Collection[CachedSequence]) -> None:
        """Check the counts. sequences: all open ones. Raises AssertionError."""
        for sequence in sequences:
            blocks = sequence.buffer.mapped_blocks, len(sequence.buffer.table)
            tokens = tuple(count * self._group.tokens_per_block for count in blocks)
            assert tokens == (sequence.mapped_tokens, sequence.table_tokens)
        assert self._reserved_blocks == sum(s.reserved_blocks for s in sequences)
        assert self.available_blocks >= 0, "more blocks are reserved than there are"
