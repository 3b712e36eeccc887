"""Gives buffers (address ranges) to sequences, maps blocks in the buffers, and counts mappings."""

from collections.abc import Sequence

from kvcache.backends.backend import MAPPING_LIMIT_S, BackendFailedError, PageBackend
from kvcache.budget import CacheLimits
from kvcache.layout import Group
from kvcache.pool import HeapPool
from kvcache.records import Block, BlockState, Leaving, MappedRun, PageTable, Pending, SparseBuffer


class BufferPool:
    """All buffers of a group of layers. The number of mappings stays within the system's limit."""

    def __init__(
        self, group: Group, pool: HeapPool, backend: PageBackend, limits: CacheLimits
    ) -> None:
        # Premapped blocks (mapped before a sequence needs them) do not count as mappings. Such
        # blocks exist only on a GPU, which has no limit of mappings.
        assert backend.maps_while_running or backend.mapping_limit is None
        self._regions = len(group.regions)
        self._most_mapped = group.most_mapped
        self._blocks_per_heap = group.blocks_per_heap
        self._pool = pool
        self._backend = backend
        self._limits = limits
        self._buffers: list[SparseBuffer] = []
        self._idle: list[SparseBuffer] = []
        """The buffers without a sequence. The buffer that has been idle longest comes first."""
        self._mappings = 0
        self.reserved_blocks = 0
        """The number of blocks that are reserved for sequences and not mapped yet."""
        self.mapped_blocks = 0
        """The number of times that a block was mapped in a buffer since the start."""
        self.unmapped_blocks = 0

    def take(self, prefix: Sequence[Block]) -> SparseBuffer | None:
        """Return a buffer with an empty page table, for a sequence that begins with ``prefix``.
        Return None if no buffer is idle and none can be made. Of idle buffers that map only free
        blocks and blocks of ``prefix``, prefer the one with the most blocks of ``prefix``. Then
        prefer a new buffer, but only while there is at most one for each sequence that may run."""
        fitting = [
            buffer
            for buffer in self._idle
            if all(
                block.state is BlockState.FREE
                for block in buffer.premapped[buffer.count_premapped(prefix) :]
            )
        ]
        count = len(self._buffers)
        reuses = fitting or (self._idle and count > self._limits.max_sequences)
        if not reuses and count < self._limits.max_buffers and self._backend.add_buffer():
            buffer = SparseBuffer(count)
            self._buffers.append(buffer)
            return buffer
        if not self._idle:
            return None
        buffer = max(fitting or self._idle[:1], key=lambda buffer: buffer.count_premapped(prefix))
        self._idle.remove(buffer)
        return buffer

    def free(self, buffer: SparseBuffer) -> None:
        """Make a buffer idle. The buffer's blocks must have been unmapped."""
        self.unmapped_blocks += len(buffer.held)
        self._count(buffer, -1)
        buffer.table = PageTable()
        buffer.leaving.clear()
        self._count(buffer, 1)
        self._idle.append(buffer)

    def leave_mapped(self, buffer: SparseBuffer) -> list[Block]:
        """Make a buffer idle, but leave its blocks mapped for later. Return these blocks."""
        self._idle.append(buffer)
        return self._cut_premapped(buffer, 0)

    def reserve(self, buffer: SparseBuffer, end: int, most_held: int) -> None:
        """Reserve blocks for a buffer's places before ``end``, instead of as many as before, but no
        more than ``most_held`` at one time."""
        self._count(buffer, -1)
        buffer.reservation, buffer.most_held = end, most_held
        self._count(buffer, 1)

    def unmap_free(self, *, idle: bool) -> bool:
        """In one buffer, unmap the first free premapped block (mapped, but not in use) and all
        after it. Return False if there is no such block. With ``idle``, search only idle
        buffers."""
        buffers = self._idle if idle else self._buffers
        buffer = next((b for b in buffers if self._pool.free_premapped[b.number]), None)
        if buffer is None:
            return False
        states = [block.state for block in buffer.premapped]
        self._unmap_premapped(buffer, states.index(BlockState.FREE))
        return True

    def unmap_all_free(self) -> None:
        while self.unmap_free(idle=False):
            pass
        self._backend.finish_mappings()

    def has_room_for(self, new_blocks: int, shared: list[Block]) -> bool:
        """Return True if mapping these blocks in one more buffer seems to stay within the limit of
        mappings. The estimate assumes that the new blocks of a heap are adjacent."""
        limit = self._backend.mapping_limit
        if limit is None:
            return True
        table = PageTable()
        table.append(shared, writable=False)
        runs = len(table.runs) + 2 + new_blocks // self._blocks_per_heap
        return self._mappings + self._regions * runs <= limit

    def places_left(self, buffer: SparseBuffer) -> int:
        """Return how many blocks may be mapped in a buffer, beside those that a sequence holds."""
        return self._most_mapped - sum(len(table.blocks) for table in buffer.tables)

    def map(self, buffer: SparseBuffer, blocks: list[Block], *, writable: bool) -> bool:
        """Map blocks at the end of the page table, except blocks that are mapped there already.
        Return False and change nothing if the limit of mappings is reached or the system
        refuses."""
        assert not buffer.pending
        first, done = buffer.table.end, self._use_premapped(buffer, blocks, writable)
        if done == len(blocks):
            return True
        self._unmap_premapped(buffer, 0)
        if not writable:
            self._make_sharable(blocks[done:])
        pieces = self._append(buffer, blocks[done:], writable)
        if pieces is None:
            return False
        for run in pieces:
            if not self._backend.map(
                buffer.number, run.block, run.heap, run.heap_block, run.count, writable
            ):
                break
            done += run.count
            self.mapped_blocks += run.count
        if done == len(blocks):
            return True
        self._unmap_from(buffer, first, done)
        return False

    def unmap_last(self, buffer: SparseBuffer, count: int) -> list[Block]:
        """Remove and return the last ``count`` blocks, which no step has used. Unmap the blocks, or
        leave them mapped for later if mappings may not change while steps run."""
        assert not buffer.pending
        return self._unmap_from(buffer, buffer.table.end - count, count)

    def map_ahead(self, buffer: SparseBuffer, blocks: list[Block]) -> bool:
        """Start mapping blocks at the table's end. Return False at the limit of mappings."""
        pieces = self._append(buffer, blocks, writable=True)
        if pieces is None:
            return False
        for run in pieces:
            ticket = self._backend.map_ahead(
                buffer.number, run.block, run.heap, run.heap_block, run.count
            )
            buffer.pending.append(Pending(ticket, run.count))
        return True

    def is_settled(self, buffer: SparseBuffer) -> bool:
        return all(p.ticket <= self._backend.completed_ticket() for p in buffer.pending)

    def settle(self, buffer: SparseBuffer) -> list[Block]:
        """Wait for queued mappings. If the system refused one, unmap the blocks of later mappings.
        Return the blocks of the refused and the later mappings."""
        place = length = buffer.mapped_blocks
        for item in buffer.pending:
            self.wait(item.ticket)
            refused = self._backend.refused(item.ticket)
            self.mapped_blocks += 0 if refused else item.count
            if not refused and place == length:
                length += item.count
            elif not refused:
                self.wait(self._backend.unmap(buffer.number, place, item.count))
                self.unmapped_blocks += item.count
            place += item.count
        buffer.pending.clear()
        return self._cut(buffer, length)

    def unmap(self, buffer: SparseBuffer) -> int:
        """Start unmapping all of a buffer's blocks. Return the ticket of the last operation."""
        assert not buffer.pending
        self._unmap_premapped(buffer, 0)
        self.leave(buffer, buffer.table.end)
        return self.unmap_leaving(buffer)

    # --- blocks that leave: mapped before the first block that the sequence needs -----------------

    def leave(self, buffer: SparseBuffer, place: int) -> None:
        """Cut the table's blocks before ``place`` off. They stay mapped until ``take_left``. If
        none is left, the table goes on at ``place``, which may be later than its end."""
        if place > buffer.table.end:
            self._unmap_premapped(buffer, 0)
        self._count(buffer, -1)
        buffer.leaving.append(Leaving(buffer.table.split(place)))
        self._count(buffer, 1)

    def jump_back(self, buffer: SparseBuffer) -> None:
        """Undo the last ``leave`` beyond the table's end. The table must be empty."""
        assert not buffer.table.blocks
        self._unmap_premapped(buffer, 0)
        self._count(buffer, -1)
        buffer.table = buffer.leaving.pop().table
        self._count(buffer, 1)

    def unmap_leaving(self, buffer: SparseBuffer) -> int:
        """Start unmapping all blocks that leave. Return the ticket of the last operation."""
        for item in buffer.leaving:
            if item.ticket is None:
                first, count = item.table.first, len(item.table.blocks)
                item.ticket = self._backend.unmap(buffer.number, first, count) if count else 0
        return max((item.ticket or 0 for item in buffer.leaving), default=0)

    def take_left(self, buffer: SparseBuffer, completed_ticket: float) -> list[PageTable]:
        """Remove and return the blocks whose unmapping is done."""
        self._count(buffer, -1)
        left = [item.table for item in buffer.leaving if item.has_left(completed_ticket)]
        del buffer.leaving[: len(left)]  # operations are done in order
        self.unmapped_blocks += sum(len(table.blocks) for table in left)
        self._count(buffer, 1)
        return left

    # --- premapped blocks: mapped before a sequence needs them ------------------------------------

    def _use_premapped(self, buffer: SparseBuffer, blocks: list[Block], writable: bool) -> int:
        """Move the common beginning of ``blocks`` and the premapped blocks to the table. Return the
        number of moved blocks."""
        count = buffer.count_premapped(blocks)
        for block in blocks[:count]:
            self._pool.drop_premapped(block, buffer)
        del buffer.premapped[:count]
        self._append(buffer, blocks[:count], writable)
        return count

    def _cut_premapped(self, buffer: SparseBuffer, length: int) -> list[Block]:
        """Cut the table to ``length`` blocks. Return the removed blocks, which become premapped."""
        blocks = self._cut(buffer, length)
        for block in blocks:
            self._pool.add_premapped(block, buffer)
        buffer.premapped[:0] = blocks
        return blocks

    def _unmap_premapped(self, buffer: SparseBuffer, first: int) -> None:
        gone = buffer.premapped[first:]
        if not gone:
            return
        self._backend.unmap(buffer.number, buffer.table.end + first, len(gone))
        self.unmapped_blocks += len(gone)
        del buffer.premapped[first:]
        for block in gone:
            self._pool.drop_premapped(block, buffer)

    def _make_sharable(self, blocks: list[Block]) -> None:
        """Unmap premapped blocks so that each of ``blocks`` may be mapped in one more buffer."""
        limit = self._limits.settings.max_sharers
        for block in blocks:
            while block.premapped_by and block.buffers + len(block.premapped_by) >= limit:
                buffer = self._buffers[block.premapped_by[0]]
                self._unmap_premapped(buffer, buffer.premapped.index(block))

    def _unmap_from(self, buffer: SparseBuffer, length: int, mapped: int) -> list[Block]:
        """Cut the table to ``length`` blocks; return the removed blocks. The first ``mapped`` of
        these are mapped: unmap them if mappings may change while steps run."""
        if not self._backend.maps_while_running:
            return self._cut_premapped(buffer, length)
        if mapped:
            self.wait(self._backend.unmap(buffer.number, length, mapped))
            self.unmapped_blocks += mapped
        return self._cut(buffer, length)

    def _append(
        self, buffer: SparseBuffer, blocks: list[Block], writable: bool
    ) -> list[MappedRun] | None:
        """Add blocks to the table. Return the runs to map, or None at the limit of mappings."""
        first = buffer.table.end
        self._count(buffer, -1)
        pieces = buffer.table.append(blocks, writable)
        self._count(buffer, 1)
        limit = self._backend.mapping_limit
        if limit is not None and self._mappings > limit:
            self._cut(buffer, first)
            return None
        return pieces

    def _cut(self, buffer: SparseBuffer, length: int) -> list[Block]:
        self._count(buffer, -1)
        gone = buffer.table.cut(length)
        self._count(buffer, 1)
        return gone

    def _count(self, buffer: SparseBuffer, sign: int) -> None:
        """Take a buffer out of the counts (-1) before it changes, and add it again afterwards."""
        self._mappings += sign * buffer.mappings(self._regions)
        self.reserved_blocks += sign * buffer.reserved_blocks

    def wait(self, ticket: int) -> None:
        if not self._backend.wait(ticket, MAPPING_LIMIT_S):
            raise BackendFailedError(f"a mapping operation took over {MAPPING_LIMIT_S:.0f} s")

    def check_invariants(self, taken: list[SparseBuffer]) -> None:
        """``taken`` must be all buffers that belong to open or closed sequences."""
        buffers = taken + self._idle
        assert {b.number for b in buffers} == {b.number for b in self._buffers}
        assert len(buffers) == len(self._buffers)
        assert all(not b.held and not b.table.first and not b.table.runs for b in self._idle)
        for buffer in buffers:
            assert all(buffer.number in block.premapped_by for block in buffer.premapped)
            assert len(buffer.premapped) <= self.places_left(buffer)
            assert self._pool.free_premapped[buffer.number] == sum(
                b.state is BlockState.FREE for b in buffer.premapped
            )
        behind = sum(len(b.held) + len(b.premapped) for b in buffers)
        behind -= sum(item.count for buffer in buffers for item in buffer.pending)
        assert self.mapped_blocks - self.unmapped_blocks == behind
        assert self.reserved_blocks == sum(buffer.reserved_blocks for buffer in taken)
        assert self._mappings == sum(buffer.mappings(self._regions) for buffer in buffers)
