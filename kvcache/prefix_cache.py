"""Shares sealed (full, read-only) blocks between sequences until the blocks are evicted.

A sequence maps blocks in order from the first on, and so shares all blocks before a shared one."""

from collections import deque
from collections.abc import Collection, Iterable

from kvcache.block import Block, BlockState
from kvcache.block_hashes import BlockHashes
from kvcache.heap_pool import HeapPool
from kvcache.prefix_index import MissReason, PrefixIndex
from kvcache.sequences import CachedSequence


class PrefixCache:
    """Seals full blocks of one HeapPool, lets other sequences find the blocks, and evicts them."""

    def __init__(self, pool: HeapPool, *, max_sharers: int, enabled: bool) -> None:
        """A block may be mapped in at most ``max_sharers`` buffers. If ``enabled`` is False,
        prompts find no blocks. Blocks are then shared only between answers to the same prompt."""
        self.index = PrefixIndex()
        self._pool = pool
        self._max_sharers = max_sharers
        self._enabled = enabled
        self._full: deque[tuple[int, CachedSequence, int]] = deque()
        """``(epoch, sequence, block index)`` of full blocks to seal when step ``epoch``
        completes."""
        self._pending_owners: dict[bytes, CachedSequence] = {}
        """The sequences that are going to compute blocks, by the hashes of the blocks."""
        self.evicted_blocks = 0

    def match(self, hashes: BlockHashes, start: int) -> list[Block]:
        blocks: list[Block] = []
        for number in range(start, hashes.shareable_blocks):
            block = self.index.find(hashes, number)
            if block is None or self.has_max_sharers(block):
                break
            blocks.append(block)
        return blocks

    def has_max_sharers(self, block: Block) -> bool:
        return block.buffers >= self._max_sharers

    def can_share_next(self, sequence: CachedSequence) -> bool:
        """Return True if the sequence's blocks are all sealed and the index holds the last one."""
        return sequence.all_sealed and self._is_indexed(sequence, len(sequence.buffer.table))

    def note_attached(self, sequence: CachedSequence, blocks: list[Block]) -> None:
        """Count a sequence as a user of the blocks that were just mapped at its table's end."""
        first = len(sequence.buffer.table) - len(blocks)
        for number, block in enumerate(blocks, first):
            if block.prefix is not None:
                self.index.use(block, system=number < sequence.system_blocks)
            self._pool.attach(block)
        tokens = len(sequence.buffer.table) * sequence.block_hashes.tokens_per_block
        sequence.progress.restart_at(tokens)

    def explain(self, sequence: CachedSequence) -> tuple[int, MissReason | None]:
        """Return the result of PrefixIndex.explain, without a reason if sharing is disabled."""
        left_at, miss = self.index.explain(sequence.block_hashes, sequence.sealed_blocks)
        return left_at, miss if self._enabled else None

    # --- blocks that another sequence is going to compute -----------------------------------------

    def add_pending_prefix(
        self, sequence: CachedSequence, ends: Collection[int] | None = None
    ) -> None:
        """Let other sequences wait for the blocks that this sequence is going to compute. Do
        nothing if this sequence may not use all cached blocks, because the index may have equal
        blocks already. Other sequences can continue only after a number of leading blocks that is
        in ``ends``, or after any number if ``ends`` is None."""
        hashes = sequence.block_hashes
        if sequence.has_pending_prefix or not self._enabled or hashes.max_cached_tokens is not None:
            return
        sequence.has_pending_prefix = True
        sealed = sequence.sealed_blocks
        if self._is_indexed(sequence, sealed):
            for number, digest in enumerate(hashes.digests[sealed:], sealed + 1):
                if ends is None or number in ends:
                    self._pending_owners[digest] = sequence

    def pending_owner(self, sequence: CachedSequence) -> int | None:
        """Return the id of another sequence whose next blocks this sequence can share, or None. The
        result stays the same until all of these blocks are sealed, so that this sequence maps all
        of them together."""
        hashes = sequence.block_hashes
        digests = hashes.digests
        if sequence.pending_block is not None:
            owner = self._pending_owners.get(digests[sequence.pending_block])
            if owner is not None and owner is not sequence:
                return owner.seq_id
            sequence.pending_block = None
        if not self._pending_owners or not self.can_share_next(sequence):
            return None
        # Search from the end for the last block with an owner. Blocks before it may have none.
        for number in reversed(range(len(sequence.buffer.table), hashes.shareable_blocks)):
            owner = self._pending_owners.get(digests[number])
            if owner is not None and owner is not sequence:
                sequence.pending_block = number
                return owner.seq_id
        return None

    def _remove_pending_prefix(self, sequence: CachedSequence) -> None:
        for digest in sequence.block_hashes.digests if sequence.has_pending_prefix else []:
            if self._pending_owners.get(digest) is sequence:
                del self._pending_owners[digest]

    # --- sealing, publishing and freeing blocks ---------------------------------------------------

    def note_filled(self, epoch: int, sequence: CachedSequence, number: int) -> None:
        self._full.append((epoch, sequence, number))

    def seal(self, completed_epoch: int) -> None:
        """Seal the blocks filled by steps up to ``completed_epoch``, so that others can share
        them."""
        while self._full and self._full[0][0] <= completed_epoch:
            _, sequence, number = self._full.popleft()
            if sequence.keeps_prefix:
                blocks = sequence.buffer.table.blocks
                assert not number or blocks[number - 1].state is not BlockState.OWNED
                self._pool.seal(blocks[number])
                self._publish(sequence, number)

    def _publish(self, sequence: CachedSequence, number: int) -> None:
        """Put a sealed block in the index, in place of an equal cached block. Leave the block out
        if an equal block is in use, or if the block before is not in the index."""
        blocks, hashes = sequence.buffer.table.blocks, sequence.block_hashes
        if not self._enabled or not self._is_indexed(sequence, number):
            return
        equal, system = self.index.find(hashes, number), number < sequence.system_blocks
        if equal is None:
            self.index.insert(hashes, number, blocks[number], system)
        elif equal.state is BlockState.CACHED:
            self.index.replace(equal, blocks[number], system)
            self._pool.free(equal)
        else:
            self._remove_pending_prefix(sequence)
        self._pending_owners.pop(hashes.digests[number], None)

    def _is_indexed(self, sequence: CachedSequence, length: int) -> bool:
        """Return True if the index has the first ``length`` blocks of the sequence's table."""
        if length == 0:
            return True
        prefix = sequence.buffer.table.blocks[length - 1].prefix
        return prefix is not None and prefix.digest == sequence.block_hashes.digests[length - 1]

    def close(self, sequence: CachedSequence) -> None:
        """Detach a closing sequence from its blocks. If other sequences may not share the blocks
        that this one wrote, remove these blocks from the index."""
        self._remove_pending_prefix(sequence)
        blocks = sequence.buffer.table.blocks
        if not sequence.keeps_prefix and len(blocks) > sequence.shared_blocks:
            first = blocks[sequence.shared_blocks]
            for block in self.index.invalidate(first) if first.prefix is not None else []:
                self._pool.free(block)
            for owner in set(self._pending_owners.values()):
                if not self._is_indexed(owner, owner.sealed_blocks):
                    self._remove_pending_prefix(owner)
        self._pool.detach(blocks)

    def cache_or_free(self, blocks: Iterable[Block]) -> None:
        """Note that ``blocks`` are no longer in the page table of a closed sequence. Of those in no
        other page table, cache the ones that the index has, and free the rest."""
        self.index.tick()
        for block in blocks:
            if self._pool.remove_buffer(block):
                if block.prefix is None:
                    self._pool.free(block)
                else:
                    self._pool.cache(block)
                    self.index.note_cached(block)

    def evict(self, limit: int = 1) -> int:
        """Evict up to ``limit`` cached blocks, the least useful first; return their number."""
        evicted = 0
        while evicted < limit and (block := self.index.evict()) is not None:
            self._pool.free(block)
            evicted += 1
        self.evicted_blocks += evicted
        return evicted

    def check_invariants(self, open_sequences: Iterable[CachedSequence]) -> None:
        self.index.check_invariants()
        sequences = set(open_sequences)
        for owner in set(self._pending_owners.values()):
            assert owner in sequences, "a sequence that left is waited for"
            assert self._is_indexed(owner, owner.sealed_blocks), "an awaited block is lost"
