"""Allocates blocks of heaps (large pieces of memory) and tracks the state of each block.

::

    free -> owned -> sealed -> quarantined -> cached -> free
              |         ^           ^  |         |
              |         +-----------|--+---------+        (shared again)
              +---------------------+
    free -> releasing (memory goes to the system) -> free

One sequence writes an *owned* block. A *sealed* block is full, is never written again, and may be
mapped in many buffers. A *quarantined* block was used by closed sequences; the device may still
read it, or a buffer may map it. Afterwards the block is *cached* if prompts can find it, else
*free*. A *releasing* block's memory is on its way back to the system.

A *premapped* block is mapped in a buffer but not in use by the buffer's sequence. A free premapped
block can be taken by that sequence only, until it is unmapped."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from kvcache.backends.backend import PageBackend, Releases
from kvcache.layout import Group
from kvcache.records import Block, BlockState, SparseBuffer, SparseHeap, runs_of

# Sizes of free gaps in which to begin a sequence's new blocks, the preferred size first. In a wide
# gap, the sequence can later take further adjacent blocks.
ROOM_FOR_A_RUN = (64, 16, 4, 1)


class HeapPool:
    """All heaps (large pieces of memory) of one group of layers, within a budget of bytes."""

    def __init__(self, group: Group, backend: PageBackend, budget_bytes: int) -> None:
        self._group = group
        self._backend = backend
        self.heaps: list[SparseHeap] = []
        self._by_free: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """Indices of heaps with free blocks, by the number of blocks that can be taken there."""
        self._releases: list[tuple[int, list[Block]]] = []
        """``(ticket, blocks)`` of running operations that release the blocks' memory."""
        self._max_heaps = budget_bytes // group.heap_bytes
        if backend.heap_limit is not None:
            self._max_heaps = min(self._max_heaps, backend.heap_limit)
        self._limit_blocks = self._max_heaps * group.blocks_per_heap
        self._counts = [0] * len(BlockState)
        self._dirty_free = 0
        self.free_premapped = Counter[int]()
        """The number of free premapped blocks of each buffer, by the buffer's number."""
        self.saved_blocks = 0
        """The number of further blocks that open sequences would need if they shared none."""
        if backend.releases is Releases.ARENA:
            while self._make_heap():
                self._commit(self.heaps[-1].blocks[0])

    @property
    def capacity_blocks(self) -> int:
        """The number of blocks within the limit, plus the number of RELEASING blocks."""
        return self.free_blocks + self.used_blocks + self._counts[BlockState.RELEASING]

    @property
    def free_blocks(self) -> int:
        """The number of blocks that may be allocated now, also in heaps that are not made yet."""
        return min(self._limit_blocks - self.used_blocks, self.unused_blocks)

    @property
    def takeable_blocks(self) -> int:
        """The number of free blocks of existing heaps that are mapped in no buffer."""
        return sum(free * len(heaps) for free, heaps in self._by_free.items())

    @property
    def premapped_blocks(self) -> int:
        return self._counts[BlockState.FREE] - self.takeable_blocks

    @property
    def unused_blocks(self) -> int:
        """The number of blocks that are free or in heaps not made yet, regardless of the limit."""
        unmade = self._max_heaps - len(self.heaps)
        return self._counts[BlockState.FREE] + unmade * self._group.blocks_per_heap

    @property
    def used_blocks(self) -> int:
        """The number of blocks that hold tokens or that the device may still read."""
        unused = self._counts[BlockState.FREE] + self._counts[BlockState.RELEASING]
        return len(self.heaps) * self._group.blocks_per_heap - unused

    @property
    def free_committed_bytes(self) -> int:
        """The bytes of free blocks that may still occupy physical memory."""
        return self._dirty_free * self._group.block_bytes

    def has_more_than(self, slack_bytes: int) -> bool:
        """Return True if the backend can release memory, and free blocks hold more memory than
        ``slack_bytes`` or than all blocks that may be allocated now."""
        kept_bytes = min(slack_bytes, self.free_blocks * self._group.block_bytes)
        return not self._backend.releases.keeps_heaps and self.free_committed_bytes > kept_bytes

    def count(self, state: BlockState) -> int:
        return self._counts[state]

    def set_limit(self, blocks: int) -> int:
        """Set the limit of used blocks; return the limit in effect. The limit is at most the
        budget, and at least the number of blocks that the backend cannot release now."""
        size = self._group.blocks_per_heap
        kept = self.used_blocks
        if self._backend.releases.keeps_heaps:
            kept = len(self.heaps) * size
        elif self._backend.releases is not Releases.BLOCKS:
            kept = sum(heap.states().count(BlockState.FREE) < size for heap in self.heaps) * size
        self._limit_blocks = min(max(blocks, kept), self._max_heaps * size)
        return self._limit_blocks

    # --- changing the states of blocks ------------------------------------------------------------

    def allocate(self, count: int, after: Block | None = None) -> list[Block] | None:
        """Take ``count`` free blocks. Return None and take none if too few are free. Prefer the
        block that follows ``after``, because adjacent blocks merge into one mapping. Otherwise
        begin in a wide gap. If only whole heaps can be released, begin in the fullest heap."""
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
        """Seal a full block that no step writes any more. The block's sequence may be closed."""
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
        """Note that a closing sequence no longer uses ``blocks``. Its buffer still maps them."""
        for block in blocks:
            block.sequences -= 1
            if block.sequences:
                self.saved_blocks -= 1
            else:
                self._move(block, BlockState.QUARANTINED, BlockState.OWNED, BlockState.SEALED)

    def remove_buffer(self, block: Block) -> bool:
        """Lower the count of a block's buffers by one. Return True if no buffer is left."""
        block.buffers -= 1
        return not block.buffers

    def cache(self, block: Block) -> None:
        """Make a block CACHED. The block must be in the prefix index and in no page table."""
        assert not block.buffers, f"{block} is mapped"
        self._move(block, BlockState.CACHED, BlockState.QUARANTINED)

    def free(self, block: Block) -> None:
        """Make a block FREE. The block must be in neither the prefix index nor any page table."""
        assert not block.buffers, f"{block} is mapped"
        assert block.prefix is None, f"{block} can be found"
        self._move(block, BlockState.FREE, BlockState.QUARANTINED, BlockState.CACHED)

    def free_unmapped(self, blocks: Iterable[Block]) -> None:
        """Free allocated blocks that were not mapped, or are only premapped (mapped, but not in
        use)."""
        for block in blocks:
            block.buffers = block.sequences = 0
            self._move(block, BlockState.FREE, BlockState.OWNED)

    # --- premapped blocks -------------------------------------------------------------------------

    def add_premapped(self, block: Block, buffer: SparseBuffer) -> None:
        assert block.state is not BlockState.FREE, f"{block} is free"
        block.premapped_by.append(buffer.number)

    def take_premapped(self, block: Block) -> None:
        """Take a free block that the sequence's own buffer already maps."""
        assert len(block.premapped_by) == 1, f"{block} is mapped elsewhere"
        assert not block.is_sealed, f"{block} may only be read"
        self._own(block)

    def drop_premapped(self, block: Block, buffer: SparseBuffer) -> None:
        """Note that a buffer's premapped block was unmapped or taken by the buffer's sequence."""
        block.premapped_by.remove(buffer.number)
        if block.state is BlockState.FREE:
            self.free_premapped[buffer.number] -= 1
            if not block.premapped_by:
                self._note_takeable(block, True)

    # --- releasing memory -------------------------------------------------------------------------

    def release_memory(self, slack_bytes: int, max_blocks: int) -> None:
        """Start releasing memory of free blocks, until free blocks hold at most ``slack_bytes``.
        Release free heaps, then single blocks if the backend can, beginning in the emptiest heap.
        Release at most ``max_blocks``, because a RELEASING block cannot be allocated."""
        for whole in (True, False) if self._backend.releases is Releases.BLOCKS else (True,):
            for number in sorted(range(len(self.heaps)), key=lambda n: -self.heaps[n].free):
                if not self.has_more_than(slack_bytes):
                    return
                heap = self.heaps[number]
                is_whole = heap.free == self._group.blocks_per_heap
                if is_whole == whole and any(block.dirty for block in heap.blocks):
                    max_blocks -= self._release_heap(number, slack_bytes, max_blocks, whole)

    def poll(self, completed_ticket: int) -> None:
        releases, self._releases = self._releases, []
        for ticket, blocks in releases:
            if ticket > completed_ticket:
                self._releases.append((ticket, blocks))
                continue
            for block in blocks:
                block.dirty = False
                self._move(block, BlockState.FREE, BlockState.RELEASING)

    def _release_heap(self, number: int, slack_bytes: int, max_blocks: int, whole: bool) -> int:
        heap = self.heaps[number]
        runs = [(0, self._group.blocks_per_heap)] if whole else runs_of(heap.free_and_dirty())
        released = 0
        for first, count in runs:
            if not self.has_more_than(slack_bytes) or released + count > max_blocks:
                break
            ticket = self._backend.release(number, first, count)
            blocks = heap.blocks[first : first + count]
            for block in blocks:
                self._move(block, BlockState.RELEASING, BlockState.FREE)
            self._releases.append((ticket, blocks))
            released += count
        return released

    # --- choosing free blocks ---------------------------------------------------------------------

    def _next(self, after: Block | None) -> Block | None:
        if after is None or after.place + 1 == self._group.blocks_per_heap:
            return None
        following = self.heaps[after.heap].blocks[after.place + 1]
        return following if following.can_be_taken else None

    def _start(self, count: int) -> Block | None:
        """Return the block at which ``count`` new blocks begin, or None if none can be taken."""
        if not self._by_free and not self._make_heap():
            return None
        if self._backend.releases in (Releases.HEAPS, Releases.IDLE):
            number = next(iter(self._by_free[min(self._by_free)]))
            return self.heaps[number].blocks[self.heaps[number].find_free()]
        heap = self.heaps[next(iter(self._by_free[max(self._by_free)]))]
        rooms = (count + ROOM_FOR_A_RUN[0], *ROOM_FOR_A_RUN)
        places = ((heap.find_free(room), room) for room in rooms)
        place, room = next((place, room) for place, room in places if place >= 0)
        # Begin in the middle of the gap, so that the sequence before the gap can also grow into it.
        return heap.blocks[place + (room - 1) // 2 if place else 0]

    def _make_heap(self) -> bool:
        if len(self.heaps) == self._max_heaps or not self._backend.add_heap():
            return False
        blocks = self._group.blocks_per_heap
        self._by_free[blocks][len(self.heaps)] = None
        self.heaps.append(SparseHeap(len(self.heaps), blocks))
        self._counts[BlockState.FREE] += blocks
        return True

    def _has_memory(self, block: Block) -> bool:
        """Return True if the block's heap has memory. Commit the heap first if necessary."""
        whole = self._backend.releases is not Releases.BLOCKS
        return block.dirty or not whole or self._backend.commit_heap(block.heap)

    def _own(self, block: Block) -> None:
        self._move(block, BlockState.OWNED)
        block.buffers = block.sequences = 1

    def _move(self, block: Block, new: BlockState, *old: BlockState) -> None:
        """Move a block from one of the states ``old`` (FREE by default) to the state ``new``."""
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
        """Mark the block as occupying physical memory, or its heap if heaps are charged whole."""
        if block.dirty:  # or its whole heap: marked already
            return
        whole = self._backend.releases is not Releases.BLOCKS
        for charged in self.heaps[block.heap].blocks if whole else (block,):
            self._dirty_free += charged.state is BlockState.FREE and not charged.dirty
            charged.dirty = True

    def _note_free(self, block: Block, is_free: bool) -> None:
        for buffer in block.premapped_by:
            self.free_premapped[buffer] += 1 if is_free else -1
        if not block.premapped_by:
            self._note_takeable(block, is_free)

    def _note_takeable(self, block: Block, is_free: bool) -> None:
        number, heap = block.heap, self.heaps[block.heap]
        if heap.free:
            peers = self._by_free[heap.free]
            del peers[number]
            if not peers:
                del self._by_free[heap.free]
        heap.note_free(block, is_free)
        if heap.free:
            self._by_free[heap.free][number] = None

    def blocks(self) -> Iterator[Block]:
        for heap in self.heaps:
            yield from heap.blocks

    def check_invariants(self) -> None:
        assert len(self.heaps) <= self._max_heaps
        assert self.used_blocks <= self._limit_blocks
        states = b"".join(heap.states() for heap in self.heaps)
        for state in BlockState:
            assert states.count(state) == self._counts[state], state.name
        dirty_free = 0
        for number, heap in enumerate(self.heaps):
            assert heap.free_map == bytes(block.can_be_taken for block in heap.blocks)
            assert heap.free == 0 or number in self._by_free[heap.free]
            dirty_free += sum(b.dirty for b in heap.blocks if b.state is BlockState.FREE)
        assert dirty_free == self._dirty_free
        users = (block.sequences for heap in self.heaps for block in heap.blocks)
        assert self.saved_blocks == sum(max(0, sequences - 1) for sequences in users)
        releasing = sum(len(blocks) for _, blocks in self._releases)
        assert releasing == self._counts[BlockState.RELEASING]
