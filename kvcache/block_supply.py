"""Blocks for sequences that grow: promised, shared, new, or mapped ahead of need."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvcache.buffer_pool import BufferPool
from kvcache.heap_pool import HeapPool
from kvcache.layout import Group
from kvcache.prefix_cache import PrefixCache
from kvcache.sequences import CachedSequence
from kvcache.sparse_heap import BlockRef, BlockState

# A block is mapped so many tokens before a decoding sequence needs it; a prompt's next chunk while
# the one before it is computed.
MAP_AHEAD_TOKENS = 8
# Memory goes back on the thread that also maps ahead: 40 ms of its time.
BYTES_RETURNED_AT_ONCE = 256 * 1024**2
# Of the heaps that the budget allows: where heaps are to be spared and so many are made, prefixes
# that nobody uses make room before the next one is.
SPARED_HEAPS_RATIO = 0.5


class BlockSupply:
    """Puts blocks behind the buffers of open sequences, and never promises one twice."""

    def __init__(
        self, group: Group, pool: HeapPool, buffers: BufferPool, prefixes: PrefixCache
    ) -> None:
        self._group = group
        self._pool = pool
        self._buffers = buffers
        self._prefixes = prefixes
        self._outstanding = 0
        self._num_sequences = 0
        self._has_waited = False
        self.waits = 0
        """Steps that had to wait for a mapping."""
        self.keeps_slack = True
        """Whether memory of free blocks is kept for the next sequences, beyond one heap."""
        self.spares_heaps = False
        """Whether heaps are made for those alone that run: what is made can never be given back."""

    @property
    def unpromised_blocks(self) -> int:
        """Blocks that are free, or would be evicted for who needs them."""
        cached = self._pool.count(BlockState.CACHED)
        return self._pool.available_blocks + cached - self._outstanding

    def promise(self, sequence: CachedSequence) -> None:
        """From now on the sequence's promised blocks are its own."""
        self._num_sequences += 1
        self._outstanding += sequence.outstanding

    def release(self, sequence: CachedSequence) -> None:
        """The sequence leaves, with nothing of its buffer in doubt."""
        self._settle(sequence)
        self._num_sequences -= 1
        self._outstanding -= sequence.outstanding

    def share(self, sequence: CachedSequence, blocks: list[BlockRef]) -> bool:
        """Maps sealed blocks of others, for reading only; False when the system refuses."""
        with self._keeping_count_of(sequence):
            if blocks and not self._buffers.map(sequence.buffer, blocks, writable=False):
                return False
        self._prefixes.shared(sequence, blocks)
        return True

    def grow(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Maps memory that the sequence does not have yet, for tokens [0, num_tokens). All or
        nothing."""
        buffer, needed = sequence.buffer, self._group.blocks_for(num_tokens)
        if num_tokens > self._group.max_tokens:
            return False
        self._has_waited = self._has_waited or not self._buffers.is_settled(buffer)
        self._settle(sequence)
        missing = needed - len(buffer.table)
        if missing <= 0:
            return True
        if missing - sequence.outstanding > self.unpromised_blocks:
            return False
        self._has_waited = True
        blocks = self._take(sequence, missing)
        if blocks is None:
            return False
        with self._keeping_count_of(sequence):
            if self._buffers.map(buffer, blocks, writable=True):
                return True
        self._pool.give_up(blocks)
        return False

    def map_ahead(self, sequence: CachedSequence, end: int, count: int) -> None:
        """Starts mapping what the steps after one of ``count`` tokens up to ``end`` will need.
        Takes blocks that nobody was promised only while there is one for every sequence."""
        buffer = sequence.buffer
        ahead = min(end + max(count, MAP_AHEAD_TOKENS), sequence.final_tokens)
        missing = self._group.blocks_for(ahead) - len(buffer.table)
        if missing > sequence.outstanding + self.unpromised_blocks - self._num_sequences:
            missing = min(missing, sequence.outstanding)
        if missing <= 0 or buffer.pending:
            return
        blocks = self._take(sequence, missing)
        if blocks is None:
            return
        with self._keeping_count_of(sequence):
            if self._buffers.map_ahead(buffer, blocks):
                return
        self._pool.give_up(blocks)

    def trim(self, slack_bytes: int) -> None:
        """Gives memory of free blocks back beyond the slack, or a heap; but of none that is
        promised."""
        promised_bytes = self._outstanding * self._group.block_bytes
        slack_bytes = (
            max(slack_bytes if self.keeps_slack else 0, self._group.heap_bytes) + promised_bytes
        )
        at_once = max(BYTES_RETURNED_AT_ONCE, self._group.heap_bytes) // self._group.block_bytes
        at_once -= self._pool.count(BlockState.RETURNING)
        self._pool.trim(slack_bytes, min(self.unpromised_blocks, at_once))

    def next_step(self) -> None:
        """What has been reserved so far is about to run."""
        self.waits += self._has_waited
        self._has_waited = False

    def _settle(self, sequence: CachedSequence) -> None:
        """Waits for blocks that are being mapped ahead; those that were refused are free again."""
        with self._keeping_count_of(sequence):
            self._pool.give_up(self._buffers.settle(sequence.buffer))

    def _take(self, sequence: CachedSequence, count: int) -> list[BlockRef] | None:
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
        """Evicts prefixes that nobody uses, where the heaps that are there then have ``count`` free
        blocks."""
        made = self._pool.num_heaps * self._group.blocks_per_heap
        missing = count - self._pool.count(BlockState.FREE)
        is_large = made >= SPARED_HEAPS_RATIO * self._pool.capacity_blocks
        if is_large and missing <= self._pool.count(BlockState.CACHED):
            for _ in range(missing):
                self._prefixes.evict()

    @contextmanager
    def _keeping_count_of(self, sequence: CachedSequence) -> Iterator[None]:
        """Around what changes the sequence's table."""
        before = sequence.outstanding
        yield
        self._outstanding += sequence.outstanding - before
        sequence.mapped_tokens = sequence.buffer.mapped_blocks * self._group.tokens_per_block
        sequence.table_tokens = len(sequence.buffer.table) * self._group.tokens_per_block

    def check_invariants(self, sequences: Collection[CachedSequence]) -> None:
        """sequences: all that are open. Raises AssertionError."""
        for sequence in sequences:
            blocks = sequence.buffer.mapped_blocks, len(sequence.buffer.table)
            tokens = tuple(count * self._group.tokens_per_block for count in blocks)
            assert tokens == (sequence.mapped_tokens, sequence.table_tokens)
        assert self._outstanding == sum(s.outstanding for s in sequences)
        assert self.unpromised_blocks >= 0, "more blocks are promised than there are"
