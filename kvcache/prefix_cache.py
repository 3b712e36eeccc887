"""Shares sealed (full, read-only) blocks between sequences until the blocks are evicted.

A sequence maps blocks in order from the first on, and so shares all blocks before a shared one."""

from collections import deque
from collections.abc import Iterable, Mapping

from kvcache.block import Block, BlockState
from kvcache.block_hashes import BlockHashes
from kvcache.evictor import UseClock
from kvcache.heap_pool import HeapPool
from kvcache.pending_prefixes import PendingPrefixes
from kvcache.prefix_index import MissReason, PrefixIndex
from kvcache.sequences import SequenceBlocks


class PrefixCache:
    """Seals full blocks of one HeapPool, lets other sequences find the blocks, and evicts them."""

    def __init__(
        self,
        pool: HeapPool,
        pending: PendingPrefixes,
        clock: UseClock,
        *,
        max_sharers: int,
        enabled: bool,
    ) -> None:
        """A block may be mapped in at most ``max_sharers`` buffers. If ``enabled`` is False,
        prompts find no blocks. Blocks are then shared only between answers to the same prompt."""
        self.index = PrefixIndex(clock)
        self._clock = clock
        self._pool = pool
        self._pending = pending
        self._max_sharers = max_sharers
        self._enabled = enabled
        self._full: deque[tuple[int, SequenceBlocks, int]] = deque()
        """``(epoch, sequence, block index)`` of full blocks to seal when step ``epoch``
        completes."""
        self.evicted_blocks = 0

    def match(self, hashes: BlockHashes, start: int, end: int) -> list[Block]:
        """Return the leading sealed blocks with the hashes ``start`` to ``end``."""
        blocks: list[Block] = []
        for number in range(start, end):
            block = self.index.find(hashes, number)
            if block is None or self.has_max_sharers(block):
                break
            blocks.append(block)
        return blocks

    def has_max_sharers(self, block: Block) -> bool:
        return block.buffers >= self._max_sharers

    def can_share_next(self, own: SequenceBlocks) -> bool:
        """Return True if the sequence's blocks are all sealed and the index holds the last one."""
        return own.all_sealed and self.is_indexed(own, len(own.blocks))

    def note_attached(self, own: SequenceBlocks, blocks: list[Block]) -> None:
        """Count a sequence as a user of the blocks that were just mapped at its table's end."""
        for number, block in enumerate(blocks, len(own.blocks) - len(blocks)):
            if block.prefix is not None:
                self.index.use(block, system=number < own.sequence.system_blocks)
            self._pool.attach(block)

    def explain(self, own: SequenceBlocks) -> tuple[int, MissReason | None]:
        """Return the result of PrefixIndex.explain, without a reason if sharing is disabled."""
        left_at, miss = self.index.explain(own.sequence.block_hashes, own.sealed_blocks)
        return left_at, miss if self._enabled else None

    def positions_to_share(self, own: SequenceBlocks) -> range:
        """Return the numbers of leading blocks that others can share once the sequence has computed
        them. There are none if this sequence may not use all cached blocks, because the index may
        have equal blocks already."""
        hashes, sealed = own.sequence.block_hashes, own.sealed_blocks
        may = self._enabled and hashes.max_cached_tokens is None and self.is_indexed(own, sealed)
        return range(sealed + 1, len(hashes.digests) + 1) if may else range(0)

    # --- sealing, publishing and freeing blocks ---------------------------------------------------

    def note_filled(self, epoch: int, own: SequenceBlocks, number: int) -> None:
        self._full.append((epoch, own, number))

    def seal(self, completed_epoch: int) -> None:
        """Seal the blocks filled by steps up to ``completed_epoch``, so that others can share
        them."""
        while self._full and self._full[0][0] <= completed_epoch:
            _, own, number = self._full.popleft()
            if own.sequence.keeps_prefix:
                assert not number or own.blocks[number - 1].state is not BlockState.OWNED
                self._pool.seal(own.blocks[number])
                self._publish(own, number)

    def _publish(self, own: SequenceBlocks, number: int) -> None:
        """Put a sealed block in the index, in place of an equal cached block. Leave the block out
        if an equal block is in use, or if the block before is not in the index."""
        block, hashes = own.blocks[number], own.sequence.block_hashes
        if not self._enabled or not self.is_indexed(own, number):
            return
        equal, system = self.index.find(hashes, number), number < own.sequence.system_blocks
        if equal is None:
            self.index.insert(hashes, number, block, system)
        elif equal.state is BlockState.CACHED:
            self.index.replace(equal, block, system)
            self._pool.free(equal)
        else:
            self._pending.withdraw(own.sequence)
        self._pending.remove(hashes.digests[number])

    def is_indexed(self, own: SequenceBlocks, length: int) -> bool:
        """Return True if the index has the first ``length`` blocks of the sequence's table."""
        if length == 0:
            return True
        prefix = own.blocks[length - 1].prefix
        digests = own.sequence.block_hashes.digests
        return prefix is not None and prefix.digest == digests[length - 1]

    def close(self, own: SequenceBlocks, others: Mapping[int, SequenceBlocks]) -> None:
        """Detach a closing sequence from its blocks. If other sequences may not share the blocks
        that this one wrote, remove these blocks from the index. ``others`` are the open sequences
        by their ids."""
        if not own.sequence.keeps_prefix and len(own.blocks) > own.shared_blocks:
            first = own.blocks[own.shared_blocks]
            for block in self.index.invalidate(first) if first.prefix is not None else []:
                self._pool.free(block)
            for owner in self._pending:
                waited_for = others[owner.seq_id]
                if not self.is_indexed(waited_for, waited_for.sealed_blocks):
                    self._pending.withdraw(owner)
        self._pool.detach(own.blocks)

    def cache_or_free(self, blocks: Iterable[Block]) -> None:
        """Note that ``blocks`` are no longer in the page table of a closed sequence. Of those in no
        other page table, cache the ones that the index has, and free the rest."""
        self._clock.tick()
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

    def check_invariants(self, sequences: Mapping[int, SequenceBlocks]) -> None:
        self.index.check_invariants()
        for owner in self._pending:
            own = sequences.get(owner.seq_id)
            assert own is not None, "a sequence that left is waited for"
            assert self.is_indexed(own, own.sealed_blocks), "an awaited block is lost"
