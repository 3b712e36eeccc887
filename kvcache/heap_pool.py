"""Allocates blocks of heaps, and keeps the state of each.

::

    free -> owned -> sealed -> quarantined -> cached -> free
              |         ^           ^  |         |
              |         +-----------|--+---------+        (shared again)
              +---------------------+
    free -> releasing (its memory, to the system) -> free

An *owned* block is written by its only sequence. A *sealed* one is full, never written again, and
stands in any number of buffers. A *quarantined* one waits until the device can no longer touch it
and no buffer has it mapped; then it is *cached* if it can be found by its prefix, or free.
A *releasing* one waits until its memory is released.

A *kept* block is free or cached, or another sequence's, and is still mapped behind the buffer of a
sequence that has left. It can be handed out where that mapping is used again, or has gone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kvcache.backend import Charge, PageBackend, Releases
from kvcache.block import Block, BlockState, PendingRelease, SparseBuffer, SparseHeap, runs_of
from kvcache.layout import Group

# Free blocks that a new run of blocks would like around it: as many as can be had.
ROOM_FOR_A_RUN = (64, 16, 4, 1)


class HeapPool:
    """All heaps under one byte budget."""

    def __init__(self, group: Group, backend: PageBackend, budget_bytes: int) -> None:
        """budget_bytes: heaps are added one at a time until the next one would exceed it."""
        self._group = group
        self._backend = backend
        self._heaps: list[SparseHeap] = []
        self._by_free: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """Heaps by the number of their free blocks, which is not 0."""
        self._releases: list[PendingRelease] = []
        self._max_heaps = budget_bytes // group.heap_bytes
        if backend.heap_limit is not None:
            self._max_heaps = min(self._max_heaps, backend.heap_limit)
        self._limit_blocks = self._max_heaps * group.blocks_per_heap
        self._counts = [0] * len(BlockState)
        self._dirty_free = 0
        self.saved_blocks = 0
        """Blocks that open sequences would need beside those that they share."""
        if backend.charge is Charge.ALL:
            while self._make_heap():
                self._commit(self._heaps[-1].blocks[0])

    # --- counts ---------------------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """Return how many blocks the limit allows, and those beyond it whose memory is not released
        yet."""
        return self.free_blocks + self.used_blocks + self._counts[BlockState.RELEASING]

    @property
    def num_heaps(self) -> int:
        """Return how many heaps have been made."""
        return len(self._heaps)

    @property
    def free_blocks(self) -> int:
        """Return how many blocks ``allocate`` could hand out now, those of heaps to be made too."""
        return min(self._limit_blocks - self.used_blocks, self.unused_blocks)

    @property
    def takeable_blocks(self) -> int:
        """Return how many blocks of made heaps are free and mapped nowhere."""
        return sum(free * len(heaps) for free, heaps in self._by_free.items())

    @property
    def premapped_blocks(self) -> int:
        """Return how many free blocks are still mapped behind a buffer."""
        return self._counts[BlockState.FREE] - self.takeable_blocks

    @property
    def unused_blocks(self) -> int:
        """Return how many blocks are free, whatever the limit; those of heaps to be made too."""
        unmade = self._max_heaps - len(self._heaps)
        return self._counts[BlockState.FREE] + unmade * self._group.blocks_per_heap

    @property
    def used_blocks(self) -> int:
        """Return how many blocks hold something, or may be read by the device."""
        unused = self._counts[BlockState.FREE] + self._counts[BlockState.RELEASING]
        return len(self._heaps) * self._group.blocks_per_heap - unused

    @property
    def free_committed_bytes(self) -> int:
        """Return the bytes of free blocks that may hold memory of the system: the pool's slack."""
        return self._dirty_free * self._group.block_bytes

    def has_more_than(self, slack_bytes: int) -> bool:
        """Return whether free blocks hold memory that can be released: more than the slack, or than
        may be used."""
        kept_bytes = min(slack_bytes, self.free_blocks * self._group.block_bytes)
        releases_any = self._backend.releases is not Releases.NOTHING
        return releases_any and self.free_committed_bytes > kept_bytes

    def count(self, state: BlockState) -> int:
        return self._counts[state]

    # --- the limit ----------------------------------------------------------------------------

    def set_limit(self, blocks: int) -> int:
        """Allow so many blocks, and no more than the budget does; return how many are allowed now.

        What is used stays allowed, and with it what cannot be given back: all heaps that have been
        made, or those in which a block is used.
        """
        size = self._group.blocks_per_heap
        kept = self.used_blocks
        if self._backend.releases is Releases.NOTHING:
            kept = len(self._heaps) * size
        elif self._backend.releases is not Releases.BLOCKS:
            kept = sum(heap.states().count(BlockState.FREE) < size for heap in self._heaps) * size
        self._limit_blocks = min(max(blocks, kept), self._max_heaps * size)
        return self._limit_blocks

    # --- the circle -----------------------------------------------------------------------------

    def allocate(self, count: int, after: Block | None = None) -> list[Block] | None:
        """Take ``count`` free blocks, or none: None when there are not as many.

        Prefers the block that follows ``after`` in its heap, because consecutive blocks share
        mappings. Where a run must begin anew, it begins where it can grow; but where the system
        takes back whole heaps only, in the fullest heap, so that others can empty.
        """
        if count > self.free_blocks:
            return None
        taken: list[Block] = []
        while len(taken) < count:
            block = self._next(after) or self._start(count - len(taken))
            if block is None or not self._has_memory(block):
                self.free_unmapped(taken)
                return None
            self._own(block)
            block.is_sealed = False
            taken.append(block)
            after = block
        return taken

    def seal(self, block: Block) -> None:
        """Seal a block: it is full, and its writer has completed. Its sequence may be closed."""
        block.is_sealed = True
        if block.state is not BlockState.QUARANTINED:
            self._move(block, BlockState.SEALED, BlockState.OWNED)

    def attach(self, block: Block) -> None:
        self.saved_blocks += block.sequences > 0
        block.buffers += 1
        block.sequences += 1
        if block.state is not BlockState.SEALED:
            self._move(block, BlockState.SEALED, BlockState.QUARANTINED, BlockState.CACHED)

    def detach(self, blocks: Iterable[Block]) -> None:
        """Detach blocks from a sequence. Its buffer still has them mapped, and the device may read
        them."""
        for block in blocks:
            block.sequences -= 1
            if block.sequences:
                self.saved_blocks -= 1
            else:
                self._move(block, BlockState.QUARANTINED, BlockState.OWNED, BlockState.SEALED)

    def remove_buffer(self, block: Block) -> bool:
        """Note that one buffer less has the block mapped; return whether none has."""
        block.buffers -= 1
        return not block.buffers

    def cache(self, block: Block) -> None:
        """Keep the block for others: nothing has it mapped, and it can be found."""
        assert not block.buffers, f"{block} is mapped"
        self._move(block, BlockState.CACHED, BlockState.QUARANTINED)

    def free(self, block: Block) -> None:
        """Free the block: no sequence has it mapped, and it cannot be found."""
        assert not block.buffers, f"{block} is mapped"
        assert block.prefix is None, f"{block} can be found"
        self._move(block, BlockState.FREE, BlockState.QUARANTINED, BlockState.CACHED)

    def free_unmapped(self, blocks: Iterable[Block]) -> None:
        """Free blocks that were allocated and never mapped; taken ones are kept again."""
        for block in blocks:
            block.buffers = block.sequences = 0
            self._move(block, BlockState.FREE, BlockState.OWNED)

    # --- blocks that stay mapped ----------------------------------------------------------------

    def add_premapped(self, block: Block, buffer: SparseBuffer) -> None:
        """Note that a buffer has the block mapped, of no sequence any more."""
        assert block.state is not BlockState.FREE, f"{block} is free"
        block.premapped_by.append(buffer)

    def take_premapped(self, block: Block) -> None:
        """Take a free block that the taker's own buffer keeps, and nobody else."""
        assert len(block.premapped_by) == 1, f"{block} is mapped elsewhere"
        assert not block.is_sealed, f"{block} may only be read"
        self._own(block)

    def drop_premapped(self, block: Block, buffer: SparseBuffer) -> None:
        """Note that a buffer keeps the block no more: it was unmapped there, or a sequence has it
        now."""
        block.premapped_by.remove(buffer)
        if block.state is BlockState.FREE:
            buffer.free_premapped -= 1
            if not block.premapped_by:
                self._note_takeable(block, True)

    # --- releasing memory -----------------------------------------------------------------------

    def release_memory(self, slack_bytes: int, max_blocks: int) -> None:
        """Start releasing memory of free blocks, until no more than the slack is kept, nor more
        than may be used.

        Whole heaps first, the emptiest before others; single blocks where the backend can; nothing
        where it can release nothing. No more than ``max_blocks``: until their memory is released
        they cannot be allocated.
        """
        for whole in (True, False) if self._backend.releases is Releases.BLOCKS else (True,):
            for number in sorted(range(len(self._heaps)), key=lambda n: -self._heaps[n].free):
                if not self.has_more_than(slack_bytes):
                    return
                heap = self._heaps[number]
                is_whole = heap.free == self._group.blocks_per_heap
                if is_whole == whole and any(block.dirty for block in heap.blocks):
                    max_blocks -= self._release_heap(number, slack_bytes, max_blocks, whole)

    def poll(self, completed_ticket: int) -> None:
        """Free the blocks whose memory has been released."""
        waiting = []
        for item in self._releases:
            if item.ticket > completed_ticket:
                waiting.append(item)
                continue
            for block in item.blocks:
                block.dirty = False
                self._move(block, BlockState.FREE, BlockState.RELEASING)
        self._releases = waiting

    def _release_heap(self, number: int, slack_bytes: int, max_blocks: int, whole: bool) -> int:
        """Start releasing memory of one heap; return how many blocks'."""
        heap = self._heaps[number]
        runs = [(0, self._group.blocks_per_heap)] if whole else runs_of(heap.free_and_dirty())
        released = 0
        for first, count in runs:
            if not self.has_more_than(slack_bytes) or released + count > max_blocks:
                break
            ticket = self._backend.release(number, first, count)
            blocks = heap.blocks[first : first + count]
            for block in blocks:
                self._move(block, BlockState.RELEASING, BlockState.FREE)
            self._releases.append(PendingRelease(ticket, blocks))
            released += count
        return released

    # --- choosing -------------------------------------------------------------------------------

    def _next(self, after: Block | None) -> Block | None:
        if after is None or after.place + 1 == self._group.blocks_per_heap:
            return None
        following = self._heaps[after.heap].blocks[after.place + 1]
        return following if following.can_be_taken else None

    def _start(self, count: int) -> Block | None:
        """Return where a run of ``count`` blocks begins; make a heap when all are full; None at
        the end of the budget or when the system refuses."""
        if not self._by_free and not self._make_heap():
            return None
        if self._backend.releases in (Releases.HEAPS, Releases.IDLE):
            number = next(iter(self._by_free[min(self._by_free)]))
            return self._heaps[number].blocks[self._heaps[number].find_free()]
        heap = self._heaps[next(iter(self._by_free[max(self._by_free)]))]
        rooms = (count + ROOM_FOR_A_RUN[0], *ROOM_FOR_A_RUN)
        found = ((heap.find_free(room), room) for room in rooms)
        place, room = next((place, room) for place, room in found if place >= 0)
        # Whoever has the block before may want to go on there.
        return heap.blocks[place + (room - 1) // 2 if place else 0]

    def _make_heap(self) -> bool:
        """Make a heap; False at the end of the budget, or when the system refuses."""
        if len(self._heaps) == self._max_heaps or not self._backend.add_heap():
            return False
        blocks = self._group.blocks_per_heap
        self._by_free[blocks][len(self._heaps)] = None
        self._heaps.append(SparseHeap.of(len(self._heaps), blocks))
        self._counts[BlockState.FREE] += blocks
        return True

    def _has_memory(self, block: Block) -> bool:
        """Return whether the block's heap has its memory, or gets it now."""
        whole = self._backend.charge is not Charge.BLOCKS
        return block.dirty or not whole or self._backend.commit_heap(block.heap)

    def _own(self, block: Block) -> None:
        self._move(block, BlockState.OWNED)
        block.buffers = block.sequences = 1

    def _move(self, block: Block, new: BlockState, *old: BlockState) -> None:
        """Move a block to a new state, from one of the old ones; from FREE where none is named."""
        state = block.state
        assert state in (old or (BlockState.FREE,)), f"{block} is {state.name}"
        block.state = new
        self._counts[state] -= 1
        self._counts[new] += 1
        if state == BlockState.FREE:
            self._note_free(block, False)
            self._dirty_free -= block.dirty
        if new == BlockState.OWNED:
            self._commit(block)
        if new == BlockState.FREE:
            self._note_free(block, True)
            self._dirty_free += block.dirty

    def _commit(self, block: Block) -> None:
        """Note that the block, or its whole heap, takes memory of the system from now on."""
        if block.dirty:  # and so is its heap, where that is charged as a whole
            return
        whole = self._backend.charge is not Charge.BLOCKS
        for its in self._heaps[block.heap].blocks if whole else (block,):
            self._dirty_free += its.state is BlockState.FREE and not its.dirty
            its.dirty = True

    def _note_free(self, block: Block, is_free: bool) -> None:
        for keeper in block.premapped_by:
            keeper.free_premapped += 1 if is_free else -1
        if not block.premapped_by:
            self._note_takeable(block, is_free)

    def _note_takeable(self, block: Block, is_free: bool) -> None:
        number, heap = block.heap, self._heaps[block.heap]
        if heap.free:
            peers = self._by_free[heap.free]
            del peers[number]
            if not peers:
                del self._by_free[heap.free]
        heap.note_free(block, is_free)
        if heap.free:
            self._by_free[heap.free][number] = None

    @property
    def heaps(self) -> Sequence[SparseHeap]:
        """Return the heaps that have been made; to be read only."""
        return self._heaps

    def blocks(self) -> Iterator[Block]:
        for heap in self._heaps:
            yield from heap.blocks

    def check_invariants(self) -> None:
        """Count blocks and free slack again. Raises AssertionError."""
        assert len(self._heaps) <= self._max_heaps
        assert self.used_blocks <= self._limit_blocks
        for state in BlockState:
            counted = sum(heap.states().count(state) for heap in self._heaps)
            assert counted == self._counts[state], f"{state.name}: {counted} blocks"
        dirty_free = 0
        for number, heap in enumerate(self._heaps):
            assert list(heap.free_map) == [block.can_be_taken for block in heap.blocks]
            assert heap.free == sum(heap.free_map)
            assert heap.free == 0 or number in self._by_free[heap.free]
            dirty_free += sum(b.dirty for b in heap.blocks if b.state is BlockState.FREE)
        assert dirty_free == self._dirty_free
        had = (block.sequences for heap in self._heaps for block in heap.blocks)
        assert self.saved_blocks == sum(max(0, sequences - 1) for sequences in had)
        releasing = sum(len(item.blocks) for item in self._releases)
        assert releasing == self._counts[BlockState.RELEASING]
