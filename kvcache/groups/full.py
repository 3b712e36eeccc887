"""The layers that keep the K and V of every token: their blocks, buffers and prefixes.

A sequence at a position needs all blocks from a first one on: here from the beginning. Layers with
a window (window.py) need fewer."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvcache.allocator import MAP_AHEAD_TOKENS, BlockAllocator
from kvcache.backends.backend import PageBackend, Releases, Segment
from kvcache.block_hashes import BlockHashes
from kvcache.budget import CacheLimits
from kvcache.buffers import BufferPool
from kvcache.evictor import NOTHING_TO_EVICT, UseClock
from kvcache.groups.base import InFiles, KVGroup, Loan, StepPlan, in_memory_alone
from kvcache.inspector import KVMap, map_blocks
from kvcache.layout import Group
from kvcache.pool import HeapPool
from kvcache.prefixes import BlockIndex, PendingPrefixes, PrefixCache, PrefixIndex
from kvcache.records import Block, BlockState, SparseBuffer
from kvcache.sequences import CachedSequence, ClosedSequence, SequenceBlocks
from kvcache.stats import KVStats, MissReason
from kvcache.views import KVViews

# The most blocks and bytes that are written to files together. Syncing costs once for all.
LENT_BLOCKS, LENT_BYTES = 32, 64 * 1024**2


class FullGroup(KVGroup):
    """The layers whose K and V rows have the same shape."""

    index_type: type[BlockIndex] = PrefixIndex

    def __init__(
        self,
        group: Group,
        backend: PageBackend,
        limits: CacheLimits,
        max_blocks: int,
        pending: PendingPrefixes,
        clock: UseClock,
    ) -> None:
        settings = limits.settings
        self.group = group
        self.backend = backend
        self.pool = HeapPool(group, backend, max_blocks * group.block_bytes)
        self.buffers = BufferPool(group, self.pool, backend, limits)
        self.prefixes = PrefixCache(
            self.index_type(clock),
            self.pool,
            pending,
            clock,
            max_sharers=settings.max_sharers,
            enabled=settings.prefix_cache and backend.shares_blocks,
            spares=self._spares,
        )
        self.allocator = BlockAllocator(
            group,
            self.pool,
            self.buffers,
            self.prefixes,
            maps_while_running=backend.maps_while_running,
            sequence_blocks=self._most_blocks(limits),
        )
        self._clock = clock
        self._size = group.tokens_per_block
        fitting = min(LENT_BYTES // group.block_bytes, self.allocator.sequence_blocks)
        self.most_lent = min(LENT_BLOCKS, max(1, fitting))
        self._free_slack_bytes = settings.free_slack_bytes
        self._maps_while_running = backend.maps_while_running
        self._open: dict[int, SequenceBlocks] = {}
        self._closed: list[ClosedSequence] = []
        self._loans: dict[Loan, list[Block | None]] = {}
        """With the blocks before the loan's that are pinned, by their numbers; None for its own."""
        self._completed_epoch = 0

    def _most_blocks(self, limits: CacheLimits) -> int:
        """Return the most blocks that a sequence needs at one time."""
        return self.group.most_blocks(self.group.max_tokens, limits.max_step_tokens)

    def _first(self, position: int) -> int:
        """Return the place of the first block that a sequence at ``position`` needs."""
        return 0

    def _spares(self, sequence: CachedSequence, number: int) -> bool:
        """Return True if a sequence's block with this number is to be evicted after others."""
        return number < sequence.system_blocks

    @property
    def capacity_tokens(self) -> int:
        enough = self.pool.capacity_blocks >= self.allocator.sequence_blocks
        return self.group.max_tokens if enough else self.pool.capacity_blocks * self._size

    # --- opening sequences ------------------------------------------------------------------------

    def match(
        self, hashes: BlockHashes, start: int, at_most: int, in_files: InFiles = in_memory_alone
    ) -> int:
        for number in range(start, at_most):
            if self.prefixes.find(hashes, number) is None and not in_files(number):
                return number
        return max(start, at_most)

    def has_room(self, hashes: BlockHashes, num_tokens: int) -> bool:
        own = self.group.blocks_for(num_tokens) - hashes.shareable_blocks
        return min(own, self.allocator.sequence_blocks) <= self.allocator.available_blocks

    def open(self, sequence: CachedSequence, position: int, wanted: int, *, alone: bool) -> bool:
        end = self.group.blocks_for(sequence.reserved_tokens)
        needed = min(end - position, self.allocator.sequence_blocks)
        prefix = self.prefixes.match(sequence.block_hashes, self._first(position), position)
        buffer = self._take_buffer(needed, prefix, alone=alone)
        if buffer is None:
            return False
        own = SequenceBlocks(sequence, buffer)
        self.allocator.add(own, end)
        if not self._attach(own, prefix, position):
            self.allocator.remove(own)
            self.buffers.free(buffer)
            return False
        self._open[sequence.seq_id] = own
        return True

    def _take_buffer(self, needed: int, prefix: list[Block], *, alone: bool) -> SparseBuffer | None:
        """Take a buffer for a sequence that needs ``needed`` blocks and the cached blocks
        ``prefix``. Return None if blocks, mappings or buffers run out."""
        cached = sum(block.state is BlockState.CACHED for block in prefix)
        if needed + cached > self.allocator.available_blocks:
            return None
        # If no sequence is open, skip the estimate: only the system's own limit counts then.
        if not alone and not self.buffers.has_room_for(needed, prefix):
            return None
        return self.buffers.take(prefix)

    def can_attach(self, seq_id: int) -> bool:
        own = self._open[seq_id]
        return own.all_sealed and self.prefixes.is_indexed(own, own.table.end)

    def attach(self, seq_id: int, position: int, parent_id: int | None = None) -> bool:
        own = self._open[seq_id]
        start = max(own.table.end, self._first(position))
        if parent_id is None:
            blocks = self.prefixes.match(own.sequence.block_hashes, start, position)
        else:
            blocks = self._open[parent_id].table.between(start, position)
        return self._attach(own, blocks, position)

    def _attach(self, own: SequenceBlocks, blocks: list[Block], position: int) -> bool:
        """Map sealed blocks that end at ``position``. Return False and change nothing if the system
        refuses, or if mappings may not change now."""
        if not self.allocator.map_shared(own, blocks):
            return False
        self.prefixes.note_attached(own, blocks)
        return True

    def can_fork(self, seq_id: int, child_id: int, position: int) -> bool:
        parent, child = self._open[seq_id], self._open[child_id]
        first = self._first(position)
        if parent.sealed_blocks < position or first < parent.table.first or not child.all_sealed:
            return False
        kept = child.table.between(max(first, child.table.first), child.table.end)
        # The child may have taken equal blocks from a third sequence, before that sequence failed.
        if child.table.end < position and parent.table.between(first, child.table.end) != kept:
            return False
        blocks = parent.table.between(max(first, child.table.end), position)
        return not any(map(self.prefixes.has_max_sharers, blocks))

    def copy_block(self, seq_id: int, child_id: int, block: int, tokens: int) -> None:
        source, target = self._open[seq_id].buffer.number, self._open[child_id].buffer.number
        self.backend.copy_block(source, block, target, block, tokens)

    def truncate(self, seq_id: int, position: int) -> None:
        own = self._open[seq_id]
        blocks = self.buffers.unmap_last(own.buffer, own.table.end - position)
        self.pool.detach(blocks)
        self.prefixes.cache_or_free(blocks)

    def positions_to_share(self, seq_id: int) -> Collection[int]:
        return self.prefixes.positions_to_share(self._open[seq_id])

    def explain(self, seq_id: int, cached_tokens: int) -> tuple[int, MissReason | None]:
        left_at, miss = self.prefixes.explain(self._open[seq_id])
        return (left_at, miss) if left_at < cached_tokens else (cached_tokens, None)

    # --- steps ------------------------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        own = self._open[seq_id]
        is_mapped = num_tokens <= own.buffer.mapped_blocks * self._size
        return is_mapped or self.allocator.grow(own, num_tokens)

    @property
    def wants_mapping_point(self) -> bool:
        return self.allocator.wants_mapping_point

    def take_waits(self) -> bool:
        has_waited, self.allocator.has_waited = self.allocator.has_waited, False
        return has_waited

    def top_up(self, plan: StepPlan) -> None:
        for seq_id, start, count, _ in plan:
            self.allocator.top_up(self._open[seq_id], start + count)

    def schedule(self, plan: StepPlan, epoch: int, views: KVViews) -> None:
        segments, growing = [], []
        for seq_id, start, count, drafts in plan:
            own, end = self._open[seq_id], start + count
            # A row has the same bits with drafts and without if the same kernel computes it.
            rows = range(start, end) if drafts else [start]
            segments += [Segment(own.buffer.number, at, 1 if drafts else count) for at in rows]
            if end + max(count, MAP_AHEAD_TOKENS) > own.table.end * self._size:
                growing.append((own, end, count))
        views.add(self.backend.rows(segments), segments)
        self.allocator.is_at_mapping_point = False
        if self._maps_while_running:
            for own, end, count in growing:
                self.allocator.map_ahead(own, end, count)

    def preview(self, plan: StepPlan, views: KVViews) -> None:
        segments = [Segment(self._open[each.seq_id].buffer.number, *each[1:3]) for each in plan]
        views.add(self.backend.rows(segments), segments)

    def commit(self, seq_id: int, start: int, end: int, epoch: int) -> None:
        for number in range(start // self._size, end // self._size):
            self.prefixes.note_filled(epoch, self._open[seq_id], number)

    def cancel_steps(self, seq_id: int) -> int:
        return self._open[seq_id].sequence.progress.computed

    def close(self, seq_id: int, epoch: int) -> None:
        own = self._open.pop(seq_id)
        self.allocator.remove(own)
        self.prefixes.close(own, self._open)
        if own.buffer.held:
            self._closed.append(ClosedSequence(own, epoch))
        else:  # no step has used the buffer
            self.buffers.free(own.buffer)

    def step_completed(self, epoch: int, *, is_quiet: bool) -> None:
        before = self._completed_epoch, len(self._closed)
        self._completed_epoch = epoch
        self.allocator.is_at_mapping_point = is_quiet
        self.allocator.wants_mapping_point &= not is_quiet
        self._advance()
        # Release only after a step or an unmapping has completed. If each retry of a refused
        # mapping released memory again, the cache would seem to recover for ever.
        if (epoch, len(self._closed)) != before and self._may_release:
            self.allocator.release_memory(self._free_slack_bytes)

    def _advance(self) -> None:
        """Seal full blocks. Unmap the blocks of closed sequences whose last step has completed, and
        free the sequences' buffers. If mappings may not change while steps run, leave the blocks
        mapped where these begin with the first one."""
        self.prefixes.seal(self._completed_epoch)
        done = self.backend.completed_ticket()
        still_closed = []
        for closed in self._closed:
            buffer = closed.blocks.buffer
            if closed.ticket is None and closed.epoch <= self._completed_epoch:
                if not (self._maps_while_running or buffer.leaving or buffer.table.first):
                    self.prefixes.cache_or_free(self.buffers.leave_mapped(buffer))
                    self.prefixes.let_go(closed.pinned)
                    continue
                if self.allocator.may_map:
                    closed.ticket = self.buffers.unmap(buffer)
            if closed.ticket is None or closed.ticket > done:
                still_closed.append(closed)
                continue
            self.prefixes.cache_or_free(buffer.held)
            self.prefixes.let_go(closed.pinned)
            self.buffers.free(buffer)
        self._closed = still_closed
        self.pool.poll(done)

    # --- records in files -------------------------------------------------------------------------

    def needed(self, position: int) -> range:
        return range(self._first(position), position)

    def has(self, hashes: BlockHashes, number: int) -> bool:
        return self.prefixes.index.find(hashes, number) is not None

    def lend(self, sequence: CachedSequence, numbers: Sequence[int]) -> Loan | None:
        """Map sealed blocks in a buffer of the loan's own, one behind the other."""
        cached = (self.prefixes.find(sequence.block_hashes, number) for number in numbers)
        blocks = [block for block in cached if block is not None]
        # No block is evicted while one behind it is in use: those between them are used, too.
        used = {*blocks, *self._blocks_before(sequence.block_hashes, numbers[-1])}
        if len(blocks) < len(numbers) or not self._can_use(used) or not self.allocator.may_map:
            return None
        buffer = self.buffers.take(blocks)
        if buffer is None:
            return None
        own = SequenceBlocks(sequence, buffer)
        if not self.allocator.map_shared(own, blocks):
            self.buffers.free(buffer)
            return None
        for block in blocks:
            self._use(block)
        return self._pinned(self._loan(own, numbers), numbers[-1])  # others may lie between

    def lend_empty(self, sequence: CachedSequence, numbers: range) -> Loan | None:
        """Map free blocks at the places that they will have in sequences."""
        if not (self.allocator.ask_to_map() and self._can_use([], len(numbers))):
            return None
        before = self._blocks_before(sequence.block_hashes, numbers.start)
        buffer = self.buffers.take([]) if self._can_use(before, len(numbers)) else None
        if buffer is None:
            return None
        own = SequenceBlocks(sequence, buffer)
        if numbers.start:
            self.buffers.leave(buffer, numbers.start)
        # Pin them first: to get memory, the least recently used blocks are evicted.
        loan = self._pinned(self._loan(own, numbers), numbers.start)
        if loan is None or self.allocator.grow(own, numbers.stop * self._size):
            return loan
        self.end_loan(loan)
        return None

    def _can_use(self, cached: Iterable[Block], more: int = 0) -> bool:
        """Return True if these blocks can be used, and ``more`` others taken."""
        evictable = sum(block.state is BlockState.CACHED for block in cached)
        return evictable + more <= self.allocator.available_blocks

    def _loan(self, own: SequenceBlocks, numbers: Sequence[int]) -> Loan:
        places = {number: place for place, number in enumerate(numbers, own.table.first)}
        buffer, backend = own.buffer.number, self.backend
        loan = Loan(
            own.sequence,
            numbers,
            self.group.block_bytes,
            lambda number, fd: backend.write_block(buffer, places[number], fd, 0),
            lambda number, fd: backend.read_block(buffer, places[number], fd, 0),
            own,
        )
        self._loans[loan] = []
        return loan

    def _use(self, block: Block) -> None:
        self.prefixes.index.use(block)
        self.pool.attach(block)

    def _blocks_before(self, hashes: BlockHashes, end: int) -> list[Block]:
        """Return the blocks before this number without which none behind them is found."""
        blocks = (self.prefixes.index.find(hashes, number) for number in range(end))
        return [block for block in blocks if block is not None]

    def _pinned(self, loan: Loan, end: int) -> Loan | None:
        """Pin the blocks before this number. If that fails, end the loan and return None."""
        if self._pin_before(loan, end):
            return loan
        self.end_loan(loan)
        return None

    def _pin_before(self, loan: Loan, end: int) -> bool:
        """Pin the cached blocks before this number: none counts as one that can be evicted while
        one behind it is in use. Return False if one is missing, or others have reserved it."""
        hashes, pinned = loan.sequence.block_hashes, self._loans[loan]
        table, index = loan.memory.table, self.prefixes.index
        if pinned and (pinned[-1] or table.at(len(pinned) - 1)).prefix is None:
            return False  # their sequence has failed: others may compute them anew
        for number in range(len(pinned), end):
            own = number in loan.adopted
            block = table.at(number) if own else index.find(hashes, number)
            if block is None or block.prefix is None:
                return False
            if block.state is BlockState.CACHED and self.allocator.available_blocks <= 0:
                return False
            if not own:
                self._use(block)
            pinned.append(None if own else block)
        return True

    def adopt(self, loan: Loan, numbers: Collection[int]) -> None:
        for number in numbers:
            if self._pin_before(loan, number) and self.prefixes.adopt(loan.memory, number):
                loan.adopted.add(number)

    def cut_loan(self, loan: Loan, end: int) -> None:
        buffer = loan.memory.buffer
        kept = max(end, buffer.table.first)
        last = self.buffers.unmap_last(buffer, buffer.table.end - kept)
        pinned = [] if loan.adopted else self._unpinned(loan)
        self.pool.detach(last)
        self.prefixes.cache_or_free([*last, *pinned])

    def end_loan(self, loan: Loan) -> None:
        pinned = self._unpinned(loan)
        self.pool.detach(loan.memory.buffer.held)
        del self._loans[loan]
        self._closed.append(ClosedSequence(loan.memory, self._completed_epoch, pinned=pinned))

    def _unpinned(self, loan: Loan) -> list[Block]:
        """Detach a loan from the blocks before its own. Return them: their memory is still used."""
        pinned = [block for block in self._loans[loan] if block is not None]
        self._loans[loan].clear()
        self.pool.detach(pinned)
        return pinned

    # --- memory -----------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return bool(self._closed) or self.pool.count(BlockState.RELEASING) > 0

    @property
    def _may_release(self) -> bool:
        """True if memory may be released now although sequences are open."""
        if not self._maps_while_running:
            return self.allocator.is_at_mapping_point
        return self.backend.releases is not Releases.IDLE

    def cheapest(self) -> float:
        block = self.prefixes.index.cheapest()
        if block is None:
            return NOTHING_TO_EVICT
        return self._clock.worth(self._size, block.found_by.last_use) / self.group.block_bytes

    def evict(self) -> None:
        self.prefixes.evict()

    def release_slack(self, *, runs: bool) -> None:
        if self._may_release or not runs:
            self.allocator.release_memory(self._free_slack_bytes)

    def release_idle(self) -> None:
        self.allocator.release_memory(0)

    def set_limit(self, blocks: int) -> int:
        return self.allocator.set_limit(blocks) * self.group.block_bytes

    def set_memory_pressure(self, *, short: bool) -> None:
        self.allocator.keeps_slack = not short
        self.allocator.spares_heaps = short and self.backend.releases.keeps_heaps

    def stats(self) -> KVStats:
        group, pool, size = self.group, self.pool, self._size
        sealed = pool.count(BlockState.SEALED)
        own_tokens = [
            max(0, own.sequence.progress.scheduled - own.sealed_blocks * size)
            for own in self._open.values()
        ]
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
            kept_heaps=len(pool.heaps) if self.backend.releases.keeps_heaps else 0,
            num_sequences=len(self._open),
            block_bytes=group.block_bytes,
            block_tokens=size,
            shared_saved_bytes=pool.saved_blocks * group.block_bytes,
            evicted_blocks=self.prefixes.evicted_blocks,
            mapped_blocks=self.buffers.mapped_blocks,
            unmapped_blocks=self.buffers.unmapped_blocks,
            late_signals=self.backend.late_signals,
        )

    def add_to(self, kv_map: KVMap) -> None:
        kv_map.groups.append(map_blocks(self.group, self.pool, self._open.values()))

    def check_invariants(self) -> None:
        using = [*self._open.values(), *(loan.memory for loan in self._loans)]
        all_sequences = [*using, *(closed.blocks for closed in self._closed)]
        self.buffers.check_invariants([own.buffer for own in all_sequences])
        self.prefixes.check_invariants(self._open)
        self.pool.check_invariants()
        pinned = Counter(block for each in self._loans.values() for block in each if block)
        users = pinned + Counter(block for own in using for block in own.buffer.held)
        pinned += Counter(block for closed in self._closed for block in closed.pinned)
        buffers = pinned + Counter(block for own in all_sequences for block in own.buffer.held)
        findable = 0
        for block in self.pool.blocks():
            assert block.sequences == users.get(block, 0), f"{block}: sequences"
            assert block.buffers == buffers.get(block, 0), f"{block}: buffers"
            _check_block(block)
            findable += block.prefix is not None
        assert findable == len(self.prefixes.index)
        for own in self._open.values():
            _check_sequence(self._size, own)
        self.allocator.check_invariants(self._open.values())
        stats = self.stats()
        charged = stats.capacity_bytes - stats.free_bytes + stats.free_slack_bytes
        if self.backend.releases is not Releases.BLOCKS:
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


def _check_sequence(size: int, own: SequenceBlocks) -> None:
    sealed_blocks, progress = own.sealed_blocks, own.sequence.progress
    mapped = own.buffer.mapped_blocks * size
    assert own.table.first <= max(0, sealed_blocks - 1), "no block before the next one is left"
    assert sealed_blocks * size <= progress.computed <= progress.scheduled <= mapped
    shared_end = own.table.first + own.shared_blocks
    assert shared_end <= sealed_blocks, "a block of others may still be written"
    for number, block in enumerate(own.blocks, own.table.first):
        expected = BlockState.SEALED if number < sealed_blocks else BlockState.OWNED
        assert block.state is expected, f"{own.sequence.seq_id}: block {number}"
