"""The one door to the cache, in sequence ids and token counts only.

Scheduler and runner come through here; neither sees a block. Prefix sharing belongs behind this
door as well: ``open`` will take the blocks that a prefix match found, and ``close`` will keep
sealed blocks instead of freeing them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import metal_ext
from kvcache.backend import BackendFailedError, PageBackend, Segment
from kvcache.heap_pool import BlockRef, BlockState, HeapPool
from kvcache.layout import KVLayout
from kvcache.sparse_buffer import SparseBuffer
from kvcache.stats import KVStats
from kvcache.views import CacheTokens, KVViews

UNDO_WAIT_S = 30.0


@dataclass(slots=True)
class _OpenSequence:
    """A sequence with a buffer. Intervals of its tokens::

    0 ........ computed ........ planned ........ blocks * tokens_per_block
    valid K/V  | being written   | mapped ahead   |
    """

    buffer: SparseBuffer
    promised: int
    """Blocks that are set aside for it, whether they are mapped yet or not."""
    computed: int = 0
    planned: int = 0

    @property
    def expected(self) -> int:
        """Blocks that it has or was promised."""
        return max(self.promised, len(self.buffer.table))

    @property
    def outstanding(self) -> int:
        """Blocks that are set aside and not mapped yet."""
        return self.expected - len(self.buffer.table)


@dataclass(slots=True)
class _Closed:
    """A buffer on its way back: first its epoch must pass, then its unmapping be done."""

    buffer: SparseBuffer
    epoch: int
    ticket: int | None = None


class KVCacheManager:
    """Keeps sequences, buffers and blocks together. Engine thread only."""

    def __init__(
        self,
        layout: KVLayout,
        backend: PageBackend,
        *,
        budget_bytes: int,
        max_sequences: int,
        free_slack_bytes: int,
        workers: metal_ext.CpuWorkers,
    ) -> None:
        """max_sequences: sequences that may be open at once. free_slack_bytes: memory of free
        blocks that is kept for the next sequences; one heap at least."""
        self._layout = layout
        self._group = layout.group
        self._backend = backend
        self._pool = HeapPool(self._group, backend, budget_bytes)
        self._free_slack_bytes = max(free_slack_bytes, self._group.heap_bytes)
        self._workers = workers
        self._copies = metal_ext.CopyCounter()
        self._tokens = CacheTokens(layout.shape.num_layers)
        # Twice as many buffers as sequences: one that leaves need not be unmapped before the next
        # one joins.
        self._max_sequences = max_sequences
        self._max_buffers = 2 * max_sequences
        self._num_buffers = 0
        self._idle_buffers: list[SparseBuffer] = []
        self._open: dict[int, _OpenSequence] = {}
        self._closed: list[_Closed] = []
        self._mappings = 0
        self._issued_epoch = 0
        self._completed_epoch = 0

    # --- the scheduler's side -------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can ever have: its addresses and the whole pool."""
        pool_tokens = self._pool.capacity_blocks * self._group.tokens_per_block
        return min(self._group.max_tokens, pool_tokens)

    def open(self, seq_id: int, num_tokens: int) -> bool:
        """Gives the sequence a buffer and sets blocks aside for ``num_tokens``, so that reserving
        them cannot fail for want of blocks.

        False, with nothing changed, when all buffers are taken or when less than one block would
        be left for each sequence that may still grow.
        """
        assert seq_id not in self._open, f"sequence {seq_id} is open"
        needed = self._group.blocks_for(num_tokens)
        if len(self._open) >= self._max_sequences or num_tokens > self._group.max_tokens:
            return False
        growing = sum(s.expected < self._group.blocks_per_buffer for s in self._open.values())
        if needed + growing > self._unpromised_blocks:
            return False
        buffer = self._take_buffer()
        if buffer is None:
            return False
        self._open[seq_id] = _OpenSequence(buffer, needed)
        return True

    @property
    def recovering(self) -> bool:
        """Whether blocks or mappings of closed sequences are still on their way back."""
        return bool(self._closed) or self._pool.count(BlockState.RETURNING) > 0

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Maps memory for tokens [0, num_tokens). All or nothing: False leaves no trace."""
        sequence = self._open[seq_id]
        table = sequence.buffer.table
        missing = self._group.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        unpromised = missing - min(missing, sequence.outstanding)
        if num_tokens > self._group.max_tokens or unpromised > self._unpromised_blocks:
            return False
        blocks = self._pool.allocate(missing, table.blocks[-1] if table.blocks else None)
        if blocks is None:
            return False
        if self._map(sequence.buffer, blocks):
            return True
        self._pool.quarantine(blocks)
        self._pool.free(blocks)
        return False

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The next ``len(token_ids)`` positions now hold valid K and V of these tokens."""
        sequence = self._open[seq_id]
        sequence.computed += len(token_ids)
        assert sequence.computed <= sequence.planned, "committed tokens were never planned"

    def close(self, seq_id: int) -> None:
        """The sequence leaves; its blocks wait for the newest step that may touch them."""
        sequence = self._open.pop(seq_id)
        self._pool.quarantine(sequence.buffer.table.blocks)
        self._closed.append(_Closed(sequence.buffer, self._issued_epoch))

    # --- the runner's side ----------------------------------------------------------------------

    def views(self, plan: Sequence[tuple[int, int, int]]) -> KVViews:
        """What a step reads and writes: ``(seq_id, start, count)`` in the order of its rows,
        segments of one row first. Opens the next epoch."""
        for seq_id, start, count in plan:
            sequence = self._open[seq_id]
            assert start == sequence.computed, f"sequence {seq_id}: {start} != {sequence.computed}"
            sequence.planned = start + count
        segments = [
            Segment(self._open[seq_id].buffer.number, start, count) for seq_id, start, count in plan
        ]
        self._issued_epoch += 1
        return KVViews(
            self._layout, self._tokens, self._backend, segments, self._workers, self._issued_epoch
        )

    def step_completed(self, completed_epoch: int) -> None:
        """The device has finished all steps up to that epoch: what waited for them moves on."""
        assert completed_epoch <= self._issued_epoch
        self._completed_epoch = max(self._completed_epoch, completed_epoch)
        self._advance(self._free_slack_bytes)

    def idle(self) -> None:
        """Nothing runs or waits: memory of free blocks goes back, but for one heap."""
        self._advance(self._group.heap_bytes)

    # --- figures --------------------------------------------------------------------------------

    @property
    def epochs(self) -> tuple[int, int]:
        """The newest epoch that was opened, and the newest that has completed."""
        return self._issued_epoch, self._completed_epoch

    @property
    def copied_bytes(self) -> int:
        """K and V bytes that were copied from block to block since the start."""
        return self._copies.bytes

    def stats(self) -> KVStats:
        """A snapshot of the figures; the parts add up to the capacity exactly."""
        group, pool = self._group, self._pool
        live = sum(s.planned for s in self._open.values())
        used = sum(group.blocks_for(s.planned) for s in self._open.values())
        waiting = pool.count(BlockState.QUARANTINED) + pool.count(BlockState.RETURNING)
        return KVStats(
            capacity_bytes=pool.capacity_blocks * group.block_bytes,
            free_bytes=pool.available_blocks * group.block_bytes,
            live_bytes=live * group.bytes_per_token,
            partial_tail_bytes=used * group.block_bytes - live * group.bytes_per_token,
            mapped_ahead_bytes=(pool.count(BlockState.OWNED) - used) * group.block_bytes,
            cached_bytes=0,
            quarantined_bytes=waiting * group.block_bytes,
            free_slack_bytes=pool.free_committed_bytes,
            committed_bytes=self._backend.committed_bytes(),
            num_heaps=pool.num_heaps,
            num_sequences=len(self._open),
        )

    def check_invariants(self) -> None:
        """Every block, buffer and byte is accounted for. Raises AssertionError."""
        self._pool.check_invariants()
        owned = [b for s in self._open.values() for b in s.buffer.table.blocks]
        waiting = [b for c in self._closed for b in c.buffer.table.blocks]
        assert len(set(owned + waiting)) == len(owned) + len(waiting), "a block has two owners"
        assert len(owned) == self._pool.count(BlockState.OWNED)
        assert len(waiting) == self._pool.count(BlockState.QUARANTINED)
        for sequence in self._open.values():
            mapped = len(sequence.buffer.table) * self._group.tokens_per_block
            assert 0 <= sequence.computed <= sequence.planned <= mapped
        buffers = [s.buffer for s in self._open.values()]
        buffers += [c.buffer for c in self._closed] + self._idle_buffers
        assert sorted(b.number for b in buffers) == list(range(self._num_buffers))
        assert all(not b.table.blocks for b in self._idle_buffers)
        assert self._mappings == sum(self._mappings_of(b) for b in buffers)
        assert self._unpromised_blocks >= 0, "more blocks are promised than there are"
        self._check_bytes()

    def _check_bytes(self) -> None:
        stats = self.stats()
        parts = stats.free_bytes + stats.live_bytes + stats.partial_tail_bytes
        parts += stats.mapped_ahead_bytes + stats.cached_bytes + stats.quarantined_bytes
        assert parts == stats.capacity_bytes, f"{parts} bytes of {stats.capacity_bytes}"
        charged = stats.capacity_bytes - stats.free_bytes + stats.free_slack_bytes
        assert stats.committed_bytes <= charged, (
            f"{stats.committed_bytes} committed, {charged} known"
        )

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _unpromised_blocks(self) -> int:
        return self._pool.available_blocks - sum(s.outstanding for s in self._open.values())

    def _take_buffer(self) -> SparseBuffer | None:
        if self._idle_buffers:
            return self._idle_buffers.pop()
        if self._num_buffers == self._max_buffers or not self._backend.add_buffer():
            return None
        self._num_buffers += 1
        return SparseBuffer(self._num_buffers - 1)

    def _map(self, buffer: SparseBuffer, blocks: list[BlockRef]) -> bool:
        """Maps blocks behind the buffer's last one; False, with nothing mapped, when refused."""
        first, before = len(buffer.table), self._mappings_of(buffer)
        buffer.table.blocks += blocks
        added = self._mappings_of(buffer) - before
        limit = self._backend.mapping_limit
        allowed = limit is None or self._mappings + added <= limit
        done = 0
        for run in buffer.table.runs(first) if allowed else []:
            if not self._backend.map(buffer.number, run.block, run.heap, run.heap_block, run.count):
                break
            done += run.count
        if done == len(blocks):
            self._mappings += added
            return True
        if done and not self._backend.wait(
            self._backend.unmap(buffer.number, first, done), UNDO_WAIT_S
        ):
            raise BackendFailedError("blocks that were mapped in vain are still mapped")
        del buffer.table.blocks[first:]
        return False

    def _mappings_of(self, buffer: SparseBuffer) -> int:
        return buffer.mappings(len(self._group.regions)) if buffer.table.blocks else 0

    def _advance(self, slack_bytes: int) -> None:
        """Moves closed buffers on: epoch passed -> unmapping -> blocks free, buffer idle."""
        done = self._backend.completed_ticket()
        still_closed = []
        for closed in self._closed:
            table = closed.buffer.table
            if closed.ticket is None and closed.epoch <= self._completed_epoch and table.blocks:
                closed.ticket = self._backend.unmap(closed.buffer.number, 0, len(table))
            if table.blocks and (closed.ticket is None or closed.ticket > done):
                still_closed.append(closed)
                continue
            self._mappings -= self._mappings_of(closed.buffer)
            self._pool.free(table.blocks)
            table.blocks.clear()
            self._idle_buffers.append(closed.buffer)
        self._closed = still_closed
        self._pool.poll(done)
        self._pool.trim(slack_bytes)
