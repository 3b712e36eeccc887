"""Records of the cache's memory: blocks, heaps, sparse buffers and cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile


class BlockState(IntEnum):
    """The state of a block. The head of heap_pool.py draws the transitions."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True, eq=False)
class Prefix:
    """The key of a sealed block: its tokens, and the digest of all tokens before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    system: bool
    last_use: int = 0
    cell: "Cell | None" = None
    """The states of the recurrent layers after the block's last token; None where none are kept."""


@dataclass(slots=True, eq=False)
class Block:
    """A physical block. HeapPool changes the state and the counts, PrefixIndex the prefix."""

    heap: int
    place: int
    """The block's index in its heap."""
    state: BlockState = BlockState.FREE
    dirty: bool = False
    """Whether the block may occupy physical memory."""
    buffers: int = 0
    """The number of buffer tables that list the block, those of closed sequences included."""
    sequences: int = 0
    """The number of open sequences that use the block."""
    prefix: Prefix | None = None
    """None: other sequences cannot find the block."""
    premapped_by: "list[SparseBuffer]" = field(default_factory=list)
    """Buffers in which the block is premapped."""
    is_sealed: bool = False
    """Whether the block was sealed since its allocation: then its mappings must not be written."""

    @property
    def can_be_taken(self) -> bool:
        return self.state is BlockState.FREE and not self.premapped_by

    @property
    def found_by(self) -> Prefix:
        assert self.prefix is not None, f"{self} cannot be found"
        return self.prefix

    def __str__(self) -> str:
        return f"block {self.place} of heap {self.heap}"


class Retention(IntEnum):
    """The reason for keeping a sealed cell, the weakest first."""

    WAYPOINT = 0
    """A point within a long prompt, from which another prompt with the same beginning can go on."""
    END = 1
    """The end of a turn, or the point at which two conversations parted."""
    USER = 2
    """The end of the newest user message: a later prompt may drop the reasoning after it."""
    SYSTEM = 3
    """The end of the system prompt and the tools."""


@dataclass(slots=True, eq=False)
class Cell:
    """The states of all recurrent layers of one sequence at one position."""

    number: int
    holders: int = 0
    """Open sequences that write or read the cell, and entries of the queue for sealing."""
    epoch: int = 0
    """The newest step that may touch the cell."""
    prefix: Prefix | None = None
    """The prefix whose states the cell holds; None: the cell is not sealed."""
    position: int = 0
    """Number of tokens before the state. Set when the cell is sealed."""
    conversation: int = 0
    """The conversation's id: its first sequence that sealed a cell. Set with ``position``."""
    retention: Retention = Retention.WAYPOINT
    before: "Cell | None" = None
    """The previous cell of the same conversation; None: the beginning."""
    is_earlier_end: bool = False
    """Whether the conversation has a newer cell with retention END."""
    last_use: int = 0
    dirty: bool = False
    """Whether the cell may occupy physical memory."""

    @property
    def is_cached(self) -> bool:
        """Whether the cell can be found and has no holder."""
        return self.prefix is not None and not self.holders

    @property
    def saves(self) -> int:
        """The number of tokens that would have to be computed again without the cell."""
        return self.position - (0 if self.before is None else self.before.position)

    def __str__(self) -> str:
        return f"cell {self.number}"


@dataclass(slots=True)
class MappedRun:
    """Blocks that take one mapping per region: consecutive both in the buffer and in one heap."""

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
    """The physical blocks of a buffer: entry i is mapped at block i of the buffer's addresses.

    The table exists on the host only. Kernels use plain addresses, which the MMU translates."""

    blocks: list[Block] = field(default_factory=list)
    runs: list[MappedRun] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, blocks: Iterable[Block], writable: bool) -> list[MappedRun]:
        """Add blocks at the end. Return the runs to map, which may extend the last run."""
        pieces: list[MappedRun] = []
        for block in blocks:
            place = len(self.blocks)
            self.blocks.append(block)
            for runs in (pieces, self.runs):
                if runs and runs[-1].grows_by(block, writable):
                    runs[-1].count += 1
                else:
                    runs.append(MappedRun(place, block.heap, block.place, 1, writable))
        return pieces

    def cut(self, length: int) -> list[Block]:
        gone = self.blocks[length:]
        del self.blocks[length:]
        while self.runs and self.runs[-1].block >= length:
            self.runs.pop()
        if self.runs:
            self.runs[-1].count = length - self.runs[-1].block
        return gone


@dataclass(slots=True)
class Pending:
    """Blocks at the end of a table whose mapping has been queued but not confirmed."""

    ticket: int
    count: int


@dataclass(slots=True, eq=False)
class SparseBuffer:
    """A backend's buffer and the blocks mapped in it. Buffers are reused, never destroyed::

    table: blocks of the sequence .............. | premapped | nothing
    mapped_blocks ................ | pending
    """

    number: int
    table: PageTable = field(default_factory=PageTable)
    pending: list[Pending] = field(default_factory=list)
    """The oldest one first. The table already lists these blocks."""
    premapped: list[Block] = field(default_factory=list)
    """Blocks still mapped after the table's end, for the buffer's next sequence."""
    free_premapped: int = 0

    @property
    def mapped_blocks(self) -> int:
        return len(self.table) - sum(item.count for item in self.pending)

    def count_premapped(self, blocks: Iterable[Block]) -> int:
        """Return how many of the leading ``blocks`` are premapped, in this order."""
        same = takewhile(lambda pair: pair[0] is pair[1], zip(self.premapped, blocks, strict=False))
        return sum(1 for _ in same)

    def usable_premapped(self, limit: int) -> list[Block]:
        """Return up to ``limit`` leading premapped blocks that the buffer's sequence may write."""
        usable = takewhile(
            lambda b: b.state is BlockState.FREE and len(b.premapped_by) == 1 and not b.is_sealed,
            self.premapped[:limit],
        )
        return list(usable)

    def mappings(self, regions: int) -> int:
        """Return the number of system mappings: one for each run and one for the gap after the
        table, in every region."""
        return regions * (len(self.table.runs) + 1) if self.table.blocks else 0


class SparseHeap:
    """The blocks of one heap."""

    def __init__(self, number: int, blocks: int) -> None:
        self.blocks = [Block(number, place) for place in range(blocks)]
        self.free = blocks
        self.free_map = bytearray(b"\1") * blocks
        """1 for each block that can be taken, else 0: ``find`` on bytes finds a run quickly."""

    def note_free(self, block: Block, is_free: bool) -> None:
        self.free_map[block.place] = is_free
        self.free += 1 if is_free else -1

    def find_free(self, count: int = 1) -> int:
        """Return the index of the first ``count`` free blocks in a row; -1: there are none."""
        return self.free_map.find(b"\1" * count)

    def states(self) -> bytes:
        return bytes(block.state for block in self.blocks)

    def free_and_dirty(self) -> list[int]:
        """Return the indices of blocks that can be taken and may occupy physical memory."""
        return [block.place for block in self.blocks if block.dirty and block.can_be_taken]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Group ascending numbers into runs ``(first, count)``."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
