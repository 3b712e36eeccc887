"""Records of the cache's memory: blocks in heaps, the buffers behind which blocks are mapped, and
the cells of recurrent states. Their pools change them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile


class BlockState(IntEnum):
    """The state of a block; heap_pool.py draws the changes."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True, eq=False)
class Prefix:
    """The key of a sealed block: its tokens, and all that come before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    system: bool
    """Whether the block belongs to a system prompt."""
    last_use: int = 0
    cell: "Cell | None" = None
    """The states of recurrent layers after the block's last token, where they are kept."""


@dataclass(slots=True, eq=False)
class Block:
    """A physical block. HeapPool changes its state and counts, PrefixIndex its prefix."""

    heap: int
    place: int
    """The number of the block in its heap."""
    state: BlockState = BlockState.FREE
    dirty: bool = False
    """Whether the block may hold memory of the system."""
    buffers: int = 0
    """Tables of buffers that have the block, those of closed sequences included."""
    sequences: int = 0
    """Open sequences that have the block."""
    prefix: Prefix | None = None
    """None where other sequences cannot find the block."""
    premapped_by: "list[SparseBuffer]" = field(default_factory=list)
    """Buffers that have the block mapped behind their tables, for no sequence."""
    is_sealed: bool = False
    """Whether the block was sealed since it was mapped: then no sequence may write it through that
    mapping."""

    @property
    def can_be_taken(self) -> bool:
        return self.state is BlockState.FREE and not self.premapped_by

    @property
    def found_by(self) -> Prefix:
        """Return the prefix of a block that can be found."""
        assert self.prefix is not None, f"{self} cannot be found"
        return self.prefix

    def __str__(self) -> str:
        return f"block {self.place} of heap {self.heap}"


class Retention(IntEnum):
    """Why a sealed cell is kept. The highest reason counts; cells with the lowest go first."""

    WAYPOINT = 0
    """A long prompt need not be computed from its beginning."""
    END = 1
    """A turn ends here, or two conversations parted here."""
    USER = 2
    """The newest message of a person ends here: a later prompt may drop the thoughts behind it."""
    SYSTEM = 3
    """The system prompt and the tools end here."""


@dataclass(slots=True, eq=False)
class Cell:
    """The states of all recurrent layers of one sequence at one position."""

    number: int
    holders: int = 0
    """Open sequences that write the cell or go on from it, and entries of the queue for sealing."""
    epoch: int = 0
    """The newest step that may touch the cell."""
    prefix: Prefix | None = None
    """The block after which the cell is found."""
    position: int = 0
    """Tokens before the state, once the cell is sealed."""
    conversation: int = 0
    """The conversation's id, once the cell is sealed: its first sequence that sealed a cell."""
    retention: Retention = Retention.WAYPOINT
    before: "Cell | None" = None
    """The cell from which the conversation would go on without this one; None: the beginning."""
    is_earlier_end: bool = False
    """Whether the conversation has a newer end of a turn."""
    last_use: int = 0
    dirty: bool = False
    """Whether the cell may hold memory of the system."""

    @property
    def is_cached(self) -> bool:
        """Return whether the cell can be found, and no sequence holds it."""
        return self.prefix is not None and not self.holders

    @property
    def saves(self) -> int:
        """Return the number of tokens that would be computed again without the cell."""
        return self.position - (0 if self.before is None else self.before.position)

    def __str__(self) -> str:
        return f"cell {self.number}"


@dataclass(slots=True)
class MappedRun:
    """Blocks that take one mapping per region: consecutive in the buffer and in one heap."""

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
    """The physical blocks behind a buffer: entry i stands behind block i.

    Only the host has this table. Kernels see plain addresses; the MMU is their block table.
    """

    blocks: list[Block] = field(default_factory=list)
    runs: list[MappedRun] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, blocks: Iterable[Block], writable: bool) -> list[MappedRun]:
        """Add blocks at the end; return the runs to map, which may continue the last run."""
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
        """Remove and return the blocks from ``length`` on."""
        gone = self.blocks[length:]
        del self.blocks[length:]
        while self.runs and self.runs[-1].block >= length:
            self.runs.pop()
        if self.runs:
            self.runs[-1].count = length - self.runs[-1].block
        return gone


@dataclass(slots=True)
class Pending:
    """Blocks at the end of a table that are being mapped."""

    ticket: int
    count: int


@dataclass(slots=True, eq=False)
class SparseBuffer:
    """A buffer of the backend and the blocks mapped behind it. Reused, never destroyed::

    table: blocks of its sequence ........... | premapped | nothing
    mapped_blocks ............... | pending
    """

    number: int
    table: PageTable = field(default_factory=PageTable)
    pending: list[Pending] = field(default_factory=list)
    """The oldest comes first. Their blocks are at the end of the table already."""
    premapped: list[Block] = field(default_factory=list)
    """Blocks mapped behind the table's last one, of no sequence: for the next one."""
    free_premapped: int = 0

    @property
    def mapped_blocks(self) -> int:
        """Return the number of leading blocks that can be used now."""
        return len(self.table) - sum(item.count for item in self.pending)

    def count_premapped(self, blocks: Iterable[Block]) -> int:
        """Return the number of leading ``blocks`` that are premapped, in this order."""
        same = takewhile(lambda pair: pair[0] is pair[1], zip(self.premapped, blocks, strict=False))
        return sum(1 for _ in same)

    def usable_premapped(self, limit: int) -> list[Block]:
        """Return the leading premapped blocks that the buffer's sequence may write, up to a limit:
        they are free, mapped nowhere else, and were never sealed."""
        usable = takewhile(
            lambda b: b.state is BlockState.FREE and len(b.premapped_by) == 1 and not b.is_sealed,
            self.premapped[:limit],
        )
        return list(usable)

    def mappings(self, regions: int) -> int:
        """Return the mappings that the system counts: each run and the gap behind the table, per
        region."""
        return regions * (len(self.table.runs) + 1) if self.table.blocks else 0


class SparseHeap:
    """The blocks of one heap, in their order."""

    def __init__(self, number: int, blocks: int) -> None:
        self.blocks = [Block(number, place) for place in range(blocks)]
        self.free = blocks
        self.free_map = bytearray(b"\1") * blocks
        """1 for each block that can be taken. A search in bytes finds room for a run fast."""

    def note_free(self, block: Block, is_free: bool) -> None:
        self.free_map[block.place] = is_free
        self.free += 1 if is_free else -1

    def find_free(self, count: int = 1) -> int:
        """Return the first place of ``count`` free blocks in a row; -1 where there are none."""
        return self.free_map.find(b"\1" * count)

    def states(self) -> bytes:
        return bytes(block.state for block in self.blocks)

    def free_and_dirty(self) -> list[int]:
        """Return the places of blocks that can be taken and may hold memory."""
        return [block.place for block in self.blocks if block.dirty and block.can_be_taken]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Return the longest runs ``(first, count)`` of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
