"""Hands out sparse buffers, and counts their mappings."""

from kvcache.backend import MAPPING_LIMIT_S, BackendFailedError, PageBackend
from kvcache.block import Block
from kvcache.layout import Group
from kvcache.sparse_buffer import MappedRun, PageTable, Pending, SparseBuffer


class BufferPool:
    """Hands out buffers; maps and unmaps blocks behind them within the system's limit."""

    def __init__(self, group: Group, backend: PageBackend, max_buffers: int) -> None:
        self._regions = len(group.regions)
        self._blocks_per_heap = group.blocks_per_heap
        self._backend = backend
        self._max_buffers = max_buffers
        self._idle: list[SparseBuffer] = []
        self._num_buffers = 0
        self._mappings = 0
        self.mapped_blocks = 0
        """Blocks that were mapped behind a buffer, in all regions, since the start."""
        self.unmapped_blocks = 0
        """Blocks that were taken from behind a buffer."""

    def take(self) -> SparseBuffer | None:
        """Return an empty buffer; None when all are taken or the system refuses to make one."""
        if self._idle:
            return self._idle.pop()
        if self._num_buffers == self._max_buffers or not self._backend.add_buffer():
            return None
        self._num_buffers += 1
        return SparseBuffer(self._num_buffers - 1)

    def free(self, buffer: SparseBuffer) -> None:
        """Free a buffer: nothing is mapped behind it any more."""
        self.unmapped_blocks += len(buffer.table)
        self._cut(buffer, 0)
        self._idle.append(buffer)

    def has_room_for(self, new_blocks: int, shared: list[Block]) -> bool:
        """Return whether a new buffer with these blocks is likely to stay within the limit, if its
        own make runs as long as heaps."""
        limit = self._backend.mapping_limit
        if limit is None:
            return True
        table = PageTable()
        table.append(shared, writable=False)
        runs = len(table.runs) + 2 + new_blocks // self._blocks_per_heap
        return self._mappings + self._regions * runs <= limit

    def map(self, buffer: SparseBuffer, blocks: list[Block], *, writable: bool) -> bool:
        """Map blocks behind the buffer's last one; False, with nothing changed, when refused."""
        assert not buffer.pending
        first = len(buffer.table)
        pieces = self._append(buffer, blocks, writable)
        if pieces is None:
            return False
        done = 0
        for run in pieces:
            if not self._backend.map(
                buffer.number, run.block, run.heap, run.heap_block, run.count, writable
            ):
                break
            done += run.count
        self.mapped_blocks += done
        if done == len(blocks):
            return True
        self._unmap_from(buffer, first, done)
        return False

    def unmap_last(self, buffer: SparseBuffer, count: int) -> list[Block]:
        """Unmap the last ``count`` blocks, which no step has used, and wait until they are; return
        them."""
        assert not buffer.pending
        return self._unmap_from(buffer, len(buffer.table) - count, count)

    def map_ahead(self, buffer: SparseBuffer, blocks: list[Block]) -> bool:
        """Start mapping blocks behind the buffer's last one; False when the limit forbids it."""
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
        """Return whether ``settle`` would not have to wait."""
        return all(p.ticket <= self._backend.completed_ticket() for p in buffer.pending)

    def settle(self, buffer: SparseBuffer) -> list[Block]:
        """Wait for what is being mapped. Return the blocks from the first one on that the system
        refused: they are in the table no more, and not mapped."""
        place = kept = buffer.mapped_blocks
        for item in buffer.pending:
            self._wait(item.ticket)
            refused = self._backend.refused(item.ticket)
            self.mapped_blocks += 0 if refused else item.count
            if not refused and place == kept:
                kept += item.count
            elif not refused:
                self._wait(self._backend.unmap(buffer.number, place, item.count))
                self.unmapped_blocks += item.count
            place += item.count
        buffer.pending.clear()
        return self._cut(buffer, kept)

    def unmap(self, buffer: SparseBuffer) -> int:
        """Start unmapping all of the buffer; return the ticket."""
        assert not buffer.pending
        return self._backend.unmap(buffer.number, 0, len(buffer.table))

    def _unmap_from(self, buffer: SparseBuffer, length: int, mapped: int) -> list[Block]:
        """Cut the table to a length; wait until so many of the blocks behind it are unmapped."""
        if mapped:
            self._wait(self._backend.unmap(buffer.number, length, mapped))
            self.unmapped_blocks += mapped
        return self._cut(buffer, length)

    def _append(
        self, buffer: SparseBuffer, blocks: list[Block], writable: bool
    ) -> list[MappedRun] | None:
        """Add blocks to the table; return what to map, or None, with nothing changed, when that
        would be more mappings than the limit allows."""
        first, before = len(buffer.table), buffer.mappings(self._regions)
        pieces = buffer.table.append(blocks, writable)
        self._mappings += buffer.mappings(self._regions) - before
        limit = self._backend.mapping_limit
        if limit is not None and self._mappings > limit:
            self._cut(buffer, first)
            return None
        return pieces

    def _cut(self, buffer: SparseBuffer, length: int) -> list[Block]:
        """Remove and return the blocks from ``length`` on, which are not mapped."""
        before = buffer.mappings(self._regions)
        gone = buffer.table.cut(length)
        self._mappings += buffer.mappings(self._regions) - before
        return gone

    def _wait(self, ticket: int) -> None:
        if not self._backend.wait(ticket, MAPPING_LIMIT_S):
            raise BackendFailedError(f"a mapping operation took over {MAPPING_LIMIT_S:.0f} s")

    def check_invariants(self, taken: list[SparseBuffer]) -> None:
        """Check the counts. taken: every buffer that is not free. Raises AssertionError."""
        buffers = taken + self._idle
        assert sorted(buffer.number for buffer in buffers) == list(range(self._num_buffers))
        assert all(not b.table.blocks and not b.table.runs for b in self._idle)
        behind = sum(buffer.mapped_blocks for buffer in taken)
        assert self.mapped_blocks - self.unmapped_blocks == behind
        assert self._mappings == sum(buffer.mappings(self._regions) for buffer in buffers)
