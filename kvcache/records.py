"""Records of the cache's memory: blocks of K and V, heaps and sparse buffers."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import takewhile


class BlockState(IntEnum):
    """The state of a block of K and V. The docstring of pool.py explains every state."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True, eq=False)
class Prefix:
    """The key that finds a sealed block: the block's tokens and a hash of all earlier tokens."""

    digest: bytes
    parent: bytes
    before: "Prefix | None"
    """The key of the block before this one, even after that block was evicted."""
    tokens: bytes
    number: int
    """The number of blocks before this one in its sequences."""
    spared: bool
    """True if the block is worth more than others, and is evicted after them."""
    last_use: int = 0


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory. HeapPool changes its state and counts, PrefixIndex its prefix."""

    heap: int
    place: int
    """The block's index in its heap."""
    state: BlockState = BlockState.FREE
    dirty: bool = False
    """True if the block may occupy physical memory."""
    buffers: int = 0
    """The number of buffers, of open or closed sequences, whose page tables list the block."""
    sequences: int = 0
    """The number of open sequences that use the block."""
    prefix: Prefix | None = None
    """The key by which new sequences can find the block, or None if they cannot."""
    premapped_by: list[int] = field(default_factory=list)
    """The numbers of buffers in which the block is mapped, and in whose page tables it is not."""
    is_sealed: bool = False
    """True if the block was sealed after it was last allocated. All mappings are then read-only."""

    @property
    def can_be_taken(self) -> bool:
        return self.state is BlockState.FREE and not self.premapped_by

    @property
    def found_by(self) -> Prefix:
        assert self.prefix is not None, f"{self} cannot be found"
        return self.prefix

    def __str__(self) -> str:
        return f"block {self.place} of heap {self.heap}"


@dataclass(slots=True)
class MappedRun:
    """Blocks that are adjacent both in a buffer and in a heap, so that they are mapped at once."""

    block: int
    heap: int
    heap_block: int
    count: int
    writable: bool

    def grows_by(self, block: Block, writable: bool) -> bool:
        following = self.heap, self.heap_block + self.count
        return (block.heap, block.place) == following and writable == self.writable


@dataclass(slots=True)
class PageTable:
    """The blocks at a buffer's places ``first``, ``first`` + 1, ... Only the host reads this table.
    Kernels use the buffer's addresses, or the paged backend's own table."""

    first: int = 0
    """The number of places before the first block, where nothing is mapped."""
    blocks: list[Block] = field(default_factory=list)
    runs: list[MappedRun] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def at(self, place: int) -> Block:
        assert place >= self.first, "the block has left"
        return self.blocks[place - self.first]

    def between(self, start: int, end: int) -> list[Block]:
        """Return the blocks at places [start, end), as far as there are any."""
        assert start >= self.first, "a block has left"
        return self.blocks[start - self.first : max(0, end - self.first)]

    def append(self, blocks: Iterable[Block], writable: bool) -> list[MappedRun]:
        """Add blocks at the end. Return the new blocks as runs, each of which is mapped at once."""
        pieces: list[MappedRun] = []
        for block in blocks:
            place = self.end
            self.blocks.append(block)
            for runs in (pieces, self.runs):
                if runs and runs[-1].grows_by(block, writable):
                    runs[-1].count += 1
                else:
                    runs.append(MappedRun(place, block.heap, block.place, 1, writable))
        return pieces

    def cut(self, end: int) -> list[Block]:
        gone = self.between(end, self.end)
        del self.blocks[end - self.first :]
        while self.runs and self.runs[-1].block >= end:
            self.runs.pop()
        if self.runs:
            self.runs[-1].count = end - self.runs[-1].block
        return gone

    def split(self, place: int) -> "PageTable":
        """Remove all blocks before ``place``, and return them as a table of their own."""
        front = PageTable(self.first, self.blocks[: place - self.first])
        del self.blocks[: place - self.first]
        self.first = place
        while self.runs and self.runs[0].block < place:
            run = self.runs.pop(0)
            count = min(run.count, place - run.block)
            front.runs.append(replace(run, count=count))
            if count < run.count:
                rest = place, run.heap, run.heap_block + count, run.count - count, run.writable
                self.runs.insert(0, MappedRun(*rest))
        return front


@dataclass(slots=True)
class Pending:
    """Blocks at the end of a page table whose mapping is queued but not confirmed."""

    ticket: int
    count: int


@dataclass(slots=True)
class Leaving:
    """Blocks behind a window that are still mapped. Their sequence does not read them any more."""

    table: PageTable
    ticket: int | None = None
    """The ticket of the queued unmapping, or None if none is queued."""

    def has_left(self, completed_ticket: float) -> bool:
        return self.ticket is not None and self.ticket <= completed_ticket


@dataclass(slots=True, eq=False)
class SparseBuffer:
    """A sequence's address range and the blocks mapped in it. Buffers are reused, never destroyed::

    leaving | nothing | table: blocks of the sequence .... | premapped before needed | nothing
    mapped_blocks .................... | pending (queued)
    """

    number: int
    table: PageTable = field(default_factory=PageTable)
    pending: list[Pending] = field(default_factory=list)
    """The queued mappings, the oldest first. The table already lists the blocks to be mapped."""
    premapped: list[Block] = field(default_factory=list)
    """The blocks mapped after the table's last one. The buffer's later sequences may use them."""

    leaving: list[Leaving] = field(default_factory=list)
    """Only layers with a window have such blocks."""

    reservation: int = 0
    """The end of the places for which blocks were reserved at the sequence's opening."""
    most_held: int = 0
    """The most blocks that are reserved for the sequence at one time, mapped or not."""

    @property
    def tables(self) -> list[PageTable]:
        return [*(item.table for item in self.leaving), self.table]

    @property
    def held(self) -> list[Block]:
        """The blocks that are mapped, or queued for mapping, except premapped ones."""
        return [block for table in self.tables for block in table.blocks]

    @property
    def reserved_blocks(self) -> int:
        """The number of reserved blocks that are not mapped yet."""
        held = sum(len(table.blocks) for table in self.tables)
        return max(0, min(self.reservation - self.table.end, self.most_held - held))

    @property
    def mapped_blocks(self) -> int:
        """The end of the places with mapped blocks."""
        return self.table.end - sum(item.count for item in self.pending)

    def count_premapped(self, blocks: Iterable[Block]) -> int:
        """Return the length of the common beginning of ``blocks`` and the premapped blocks."""
        same = takewhile(lambda pair: pair[0] is pair[1], zip(self.premapped, blocks, strict=False))
        return sum(1 for _ in same)

    def usable_premapped(self, limit: int) -> list[Block]:
        """Return at most ``limit`` leading premapped blocks that a sequence can take and write."""
        usable = takewhile(
            lambda b: b.state is BlockState.FREE and len(b.premapped_by) == 1 and not b.is_sealed,
            self.premapped[:limit],
        )
        return list(usable)

    def mappings(self, regions: int) -> int:
        """Return the number of mappings that the system counts: each region (a layer's K or V) has
        one per run of blocks, and one for the addresses without memory."""
        runs = sum(len(table.runs) for table in self.tables)
        return regions * (runs + 1) if runs else 0


class SparseHeap:
    """The blocks of one heap (a large piece of memory), and a map of its free blocks."""

    def __init__(self, number: int, blocks: int) -> None:
        self.blocks = [Block(number, place) for place in range(blocks)]
        self.free_map = bytearray(b"\1") * blocks
        """Holds 1 for each block that can be taken, else 0: ``bytes.find`` finds free gaps."""

    def note_free(self, block: Block, is_free: bool) -> None:
        self.free_map[block.place] = is_free

    @property
    def free(self) -> int:
        return self.free_map.count(1)

    def find_free(self, count: int = 1) -> int:
        """Return the index of the first of ``count`` adjacent free blocks, or -1 if there are
        none."""
        return self.free_map.find(b"\1" * count)

    def states(self) -> bytes:
        return bytes(block.state for block in self.blocks)

    def free_and_dirty(self) -> list[int]:
        """Return the indices of blocks that can be taken and may occupy physical memory."""
        return [block.place for block in self.blocks if block.dirty and block.can_be_taken]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Group ascending block indices into runs ``(first index, number of blocks)``."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
