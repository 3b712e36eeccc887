"""Physical memory: which blocks of which heaps are free, owned, or waiting.

A block goes round in a circle::

    free -> owned -> quarantined -> free
      |                              ^
      +--> returning (memory goes back to the system) --+

*Quarantined* blocks wait until the device can no longer touch them and nothing is mapped to them;
*returning* ones until their memory is gone. Neither may be handed out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvcache.backend import PageBackend
from kvcache.layout import Group


class BlockRef(NamedTuple):
    """A physical block: its heap's number and its place in the heap."""

    heap: int
    place: int


class BlockState(IntEnum):
    """What may be done with a block."""

    FREE = 0
    OWNED = 1
    QUARANTINED = 2
    RETURNING = 3


@dataclass(slots=True)
class SparseHeap:
    """One heap's blocks. ``dirty`` marks those that may hold memory of the system."""

    states: bytearray
    dirty: bytearray
    free: int

    @classmethod
    def of(cls, blocks: int) -> "SparseHeap":
        """A heap whose blocks are all free and hold no memory."""
        return cls(bytearray(blocks), bytearray(blocks), blocks)

    def runs(self, wanted: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Maximal runs ``(first, count)`` of blocks for which ``wanted`` holds."""
        return runs_of([index for index in range(len(self.states)) if wanted(index)])


@dataclass(slots=True)
class _Return:
    """Memory on its way back to the system."""

    ticket: int
    blocks: list[BlockRef]


class HeapPool:
    """All heaps under one byte budget."""

    def __init__(self, group: Group, backend: PageBackend, budget_bytes: int) -> None:
        """budget_bytes: heaps are added one at a time until the next one would exceed it."""
        self._group = group
        self._backend = backend
        self._heaps: list[SparseHeap] = []
        self._returns: list[_Return] = []
        self._max_heaps = budget_bytes // group.heap_bytes
        self._counts = [0] * len(BlockState)
        self._dirty_free = 0

    # --- counts ---------------------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """Blocks of all heaps that the budget allows."""
        return self._max_heaps * self._group.blocks_per_heap

    @property
    def num_heaps(self) -> int:
        """Heaps that have been made."""
        return len(self._heaps)

    @property
    def available_blocks(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        unmade = self._max_heaps - len(self._heaps)
        return self._counts[BlockState.FREE] + unmade * self._group.blocks_per_heap

    @property
    def free_committed_bytes(self) -> int:
        """Bytes of free blocks that may hold memory of the system: the pool's slack."""
        return self._dirty_free * self._group.block_bytes

    def count(self, state: BlockState) -> int:
        """Blocks of made heaps in that state."""
        return self._counts[state]

    # --- the circle -----------------------------------------------------------------------------

    def allocate(self, count: int, after: BlockRef | None = None) -> list[BlockRef] | None:
        """Takes ``count`` free blocks, or none: None when there are not as many.

        Prefers the block that follows ``after`` in its heap, because consecutive blocks share
        mappings; then the fullest heap, so that others can empty.
        """
        if count > self.available_blocks:
            return None
        taken: list[BlockRef] = []
        while len(taken) < count:
            heap = self._next_heap(after)
            if heap is None:
                for block in taken:
                    self._move(block, BlockState.OWNED, BlockState.FREE)
                return None
            start = after.place + 1 if after is not None and after.heap == heap else 0
            index = self._next_block(heap, start)
            block = BlockRef(heap, index)
            self._move(block, BlockState.FREE, BlockState.OWNED)
            taken.append(block)
            after = block
        return taken

    def quarantine(self, blocks: Iterable[BlockRef]) -> None:
        """Their owner lets go of them; they may still be read or mapped."""
        for block in blocks:
            self._move(block, BlockState.OWNED, BlockState.QUARANTINED)

    def free(self, blocks: Iterable[BlockRef]) -> None:
        """Nothing can touch them any more: they may be handed out again."""
        for block in blocks:
            self._move(block, BlockState.QUARANTINED, BlockState.FREE)

    # --- giving memory back ---------------------------------------------------------------------

    def trim(self, slack_bytes: int) -> None:
        """Starts giving memory of free blocks back, until no more than the slack is kept.

        Whole heaps first, the emptiest before others; single blocks where the backend can.
        """
        if self.free_committed_bytes <= slack_bytes:
            return
        for whole in (True, False) if self._backend.releases_blocks else (True,):
            for number in sorted(range(len(self._heaps)), key=lambda n: -self._heaps[n].free):
                if self.free_committed_bytes <= slack_bytes:
                    return
                heap = self._heaps[number]
                if (heap.free == self._group.blocks_per_heap) == whole and any(heap.dirty):
                    self._return_memory(number, slack_bytes, whole)

    def poll(self, completed_ticket: int) -> None:
        """Blocks whose memory has gone back are free again."""
        waiting = []
        for item in self._returns:
            if item.ticket > completed_ticket:
                waiting.append(item)
                continue
            for block in item.blocks:
                self._heaps[block.heap].dirty[block.place] = False
                self._move(block, BlockState.RETURNING, BlockState.FREE)
        self._returns = waiting

    def _return_memory(self, number: int, slack_bytes: int, whole: bool) -> None:
        heap = self._heaps[number]
        free_dirty = heap.runs(lambda i: heap.states[i] == BlockState.FREE and bool(heap.dirty[i]))
        runs = [(0, self._group.blocks_per_heap)] if whole else free_dirty
        for first, count in runs:
            if self.free_committed_bytes <= slack_bytes:
                return
            ticket = self._backend.release(number, first, count)
            blocks = [BlockRef(number, index) for index in range(first, first + count)]
            for block in blocks:
                self._move(block, BlockState.FREE, BlockState.RETURNING)
            self._returns.append(_Return(ticket, blocks))

    # --- choosing -------------------------------------------------------------------------------

    def _next_heap(self, after: BlockRef | None) -> int | None:
        """The heap to take the next block from; makes one when all are full; None at the end."""
        if after is not None:
            states = self._heaps[after.heap].states
            following = after.place + 1
            if following < len(states) and states[following] == BlockState.FREE:
                return after.heap
        candidates = [number for number, heap in enumerate(self._heaps) if heap.free]
        if candidates:
            return min(candidates, key=lambda number: self._heaps[number].free)
        if len(self._heaps) == self._max_heaps or not self._backend.add_heap():
            return None
        self._heaps.append(SparseHeap.of(self._group.blocks_per_heap))
        self._counts[BlockState.FREE] += self._group.blocks_per_heap
        return len(self._heaps) - 1

    def _next_block(self, heap: int, start: int) -> int:
        states = self._heaps[heap].states
        index = states.find(BlockState.FREE, start)
        return index if index >= 0 else states.find(BlockState.FREE)

    def _move(self, block: BlockRef, old: BlockState, new: BlockState) -> None:
        heap = self._heaps[block.heap]
        state = heap.states[block.place]
        assert state == old, f"{block} is {BlockState(state).name}, not {old.name}"
        dirty = heap.dirty[block.place]
        heap.states[block.place] = new
        self._counts[old] -= 1
        self._counts[new] += 1
        if old == BlockState.FREE:
            heap.free -= 1
            self._dirty_free -= dirty
        if new == BlockState.OWNED:
            heap.dirty[block.place] = True
        if new == BlockState.FREE:
            heap.free += 1
            self._dirty_free += heap.dirty[block.place]

    def check_invariants(self) -> None:
        """Counts recounted from the blocks; free slack recounted from the dirty marks."""
        assert len(self._heaps) <= self._max_heaps
        for state in BlockState:
            counted = sum(heap.states.count(state) for heap in self._heaps)
            assert counted == self._counts[state], f"{state.name}: {counted} blocks"
        dirty_free = 0
        for heap in self._heaps:
            assert heap.free == heap.states.count(BlockState.FREE)
            dirty_free += sum(
                dirty
                for state, dirty in zip(heap.states, heap.dirty, strict=True)
                if state == BlockState.FREE
            )
        assert dirty_free == self._dirty_free
        returning = sum(len(item.blocks) for item in self._returns)
        assert returning == self._counts[BlockState.RETURNING]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Maximal runs ``(first, count)`` of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
