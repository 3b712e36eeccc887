"""The layers that attend to a window of tokens: K and V behind it are unmapped and freed.

Addresses stay linear in the position. A sequence keeps the blocks that the window of its last block
boundary touches, to which any group may send it back, and all blocks after these::

    0 ... left: cached, or freed ... | window | boundary ... computed ... mapped

A cached block is found by itself, whether or not those before it are kept. Evicted last are the
blocks of windows that end where other prompts may go on."""

import math

from kvcache.block_hashes import BlockHashes
from kvcache.evictor import NOTHING_TO_EVICT
from kvcache.groups.base import InFiles, Loan, in_memory_alone
from kvcache.groups.full import FullGroup
from kvcache.prefixes import BlockIndex
from kvcache.records import Block, BlockState, PageTable
from kvcache.sequences import CachedSequence, SequenceBlocks
from kvcache.stats import MissReason


class WindowGroup(FullGroup):
    """The layers whose K and V rows have the same shape, and whose window has the same length."""

    index_type = BlockIndex

    def _first(self, position: int) -> int:
        # A token attends to itself and to window - 1 tokens before it. The block before the
        # position stays even if the window is one token: it says whether the next one is shared.
        before = max(self.group.window - 1, 1)
        return max(0, position * self._size - before) // self._size

    def _blocks_before(self, hashes: BlockHashes, end: int) -> list[Block]:
        return []

    def _pin_before(self, loan: Loan, end: int) -> bool:
        return True  # any block can be evicted

    def lend_empty(self, sequence: CachedSequence, numbers: range) -> Loan | None:
        if not self.allocator.ask_to_map():
            return None
        hashes, wide = sequence.block_hashes, self.group.blocks_for(self.group.window)
        around = range(self._first(numbers.stop), min(numbers.stop + wide, len(hashes.digests)))
        window = [b for n in around if (b := self.prefixes.index.find(hashes, n)) is not None]
        if not self._can_use(window, len(numbers)):
            return None
        for block in window:  # so that none is evicted for the rest of the window
            self._use(block)
        loan = super().lend_empty(sequence, numbers)
        self.pool.detach(window)
        self.prefixes.cache_or_free(window)
        return loan

    def _spares(self, sequence: CachedSequence, number: int) -> bool:
        return True  # it is in the newest window

    # --- opening sequences ------------------------------------------------------------------------

    def match(
        self, hashes: BlockHashes, start: int, at_most: int, in_files: InFiles = in_memory_alone
    ) -> int:
        position = at_most
        for number in range(at_most - 1, start - 1, -1):
            if self.prefixes.find(hashes, number) is None and not in_files(number):
                position = number
            elif number <= max(start, self._first(position)):
                return position
        return start

    def has_room(self, hashes: BlockHashes, num_tokens: int) -> bool:
        return super().has_room(hashes, num_tokens) or self._want_point()

    def open(self, sequence: CachedSequence, position: int, wanted: int, *, alone: bool) -> bool:
        return super().open(sequence, position, wanted, alone=alone) or self._want_point()

    def _attach(self, own: SequenceBlocks, blocks: list[Block], position: int) -> bool:
        buffer, first = own.buffer, position - len(blocks)
        cached = sum(block.state is BlockState.CACHED for block in blocks)
        if cached > self.allocator.available_blocks + buffer.reserved_blocks:
            return False
        jumps = first > own.table.end
        if jumps:
            if not self.allocator.ask_to_map():
                return False
            self.buffers.leave(buffer, first)
        attached = super()._attach(own, blocks, position)
        if jumps and not attached:
            self.buffers.jump_back(buffer)
        self.allocator.adjust(own)
        return attached

    def truncate(self, seq_id: int, position: int) -> None:
        own = self._open[seq_id]
        first = own.table.first
        super().truncate(seq_id, max(position, first))
        if position < first:
            self.buffers.jump_back(own.buffer)
        self.allocator.adjust(own)

    def explain(self, seq_id: int, cached_tokens: int) -> tuple[int, MissReason | None]:
        own, index = self._open[seq_id], self.prefixes.index
        hashes = own.sequence.block_hashes
        end = min(cached_tokens // self._size, hashes.shareable_blocks)
        needed = range(max(own.table.end, self._first(end)), end)
        if all(index.find(hashes, number) is not None for number in needed):
            return cached_tokens, None
        _, miss = self.prefixes.explain(own)
        return self.match(hashes, own.table.end, end) * self._size, miss

    # --- steps ------------------------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        return super().reserve(seq_id, num_tokens, drafts) or self._want_point()

    def _want_point(self) -> bool:
        """Ask for a mapping point if blocks can only be unmapped at one. Return False."""
        if not self._may_leave and (self._closed or self._leaves):
            self.allocator.wants_mapping_point = True
        return False

    @property
    def _may_leave(self) -> bool:
        """True if blocks may be unmapped. In a ring, those that stay get other addresses by that: a
        GPU must have completed all steps that wrote them (MTL4VisibilityOptionResourceAlias)."""
        return self.allocator.is_at_mapping_point if self.group.has_ring else self.allocator.may_map

    @property
    def _leaves(self) -> bool:
        """True if open sequences have blocks that they do not need."""
        return any(
            own.buffer.leaving or self._first(own.sealed_blocks) > own.table.first
            for own in self._open.values()
        )

    def close(self, seq_id: int, epoch: int) -> None:
        own = self._open[seq_id]
        end = own.sealed_blocks
        for block in own.table.between(max(own.table.first, self._first(end)), end):
            if block.prefix is not None:
                self.prefixes.index.set_spared(block, True)
        super().close(seq_id, epoch)

    def _advance(self) -> None:
        """Also let go of the blocks that no sequence needs. A sealed block was computed by a step
        that has completed, so that no step runs that began before the block's end."""
        super()._advance()
        if not self._may_leave:
            return
        # At a mapping point, memory is used after it was unmapped, whatever the ticket.
        waits, at_point = self.group.has_ring, not self._maps_while_running
        done = math.inf if waits or at_point else self.backend.completed_ticket()
        for own in self._open.values():
            first = self._first(own.sealed_blocks)
            if first > own.table.first:
                self.buffers.leave(own.buffer, first)
            ticket = self.buffers.unmap_leaving(own.buffer)
            if waits:
                self.buffers.wait(ticket)
            for table in self.buffers.take_left(own.buffer, done):
                self._let_go(own, table)

    def _let_go(self, own: SequenceBlocks, left: PageTable) -> None:
        """Cache or free a sequence's unmapped blocks."""
        kept = self._kept_places(own.sequence)
        for place, block in enumerate(left.blocks, left.first):
            if block.prefix is not None:
                self.prefixes.index.set_spared(block, place in kept)
        self.pool.detach(left.blocks)
        self.prefixes.let_go(left.blocks)
        self.allocator.adjust(own)

    def _kept_places(self, sequence: CachedSequence) -> set[int]:
        """Return the places of the windows at whose ends other prompts may go on."""
        last = sequence.reserved_tokens - 2
        ends = [tokens // self._size for tokens in (*sequence.boundaries, last)]
        return {place for end in ends for place in range(self._first(end), end)}

    @property
    def recovering(self) -> bool:
        return super().recovering or self._leaves or self.prefixes.is_sealing

    # --- memory -----------------------------------------------------------------------------------

    def cheapest(self) -> float:
        block = self.prefixes.index.cheapest()
        if block is None:
            return NOTHING_TO_EVICT
        end = block.found_by.number + 1
        # Without one block of a window, all tokens before its end are computed again.
        saved = end * self._size / (end - self._first(end)) if block.found_by.spared else 0
        return self._clock.worth(saved, block.found_by.last_use) / self.group.block_bytes
