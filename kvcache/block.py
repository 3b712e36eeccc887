"""Records of what the cache keeps: blocks and the heaps that they lie in, the buffers behind which
they are mapped, and cells. Their pools change them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile


class BlockState(IntEnum):
    """The state of a block."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True, eq=False)
class Prefix:
    """What a sealed block is found by: its tokens, and all that come before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    system: bool
    """Whether it belongs to a system prompt."""
    last_use: int = 0
    cell: "Cell | None" = None
    """The states of recurrent layers after its last token, where they are kept."""


@dataclass(slots=True, eq=False)
class Block:
    """A physical block and all that is known of it. The pool of heaps changes the state and the
    counts, the index of prefixes the prefix."""

    heap: int
    place: int
    """In the heap."""
    state: BlockState = BlockState.FREE
    dirty: bool = False
    """Whether it may hold memory of the system."""
    buffers: int = 0
    """How many have it mapped in their tables, those of closed sequences included."""
    sequences: int = 0
    """How many open ones have it."""
    prefix: Prefix | None = None
    """None where it cannot be found."""
    keepers: "list[SparseBuffer]" = field(default_factory=list)
    """Buffers that have it mapped behind their tables, of no sequence any more."""
    is_sealed: bool = False
    """Whether it was sealed since it was mapped: then no sequence may write it through that
    mapping."""

    @property
    def can_be_taken(self) -> bool:
        """Return whether it is free, and mapped nowhere."""
        return self.state is BlockState.FREE and not self.keepers

    @property
    def found_by(self) -> Prefix:
        """Return its prefix: it can be found."""
        assert self.prefix is not None, f"{self} cannot be found"
        return self.prefix

    def __str__(self) -> str:
        return f"block {self.place} of heap {self.heap}"


class Keep(IntEnum):
    """Why a sealed cell is kept. Where there are several reasons, the last one counts."""

    WAYPOINT = 0
    """So that a long prompt need not be computed from its beginning. Evicted before all others."""
    END = 1
    """A turn ends here, or two conversations were seen to part."""
    USER = 2
    """The newest message of a person ends here: thoughts that follow may be dropped."""
    SYSTEM = 3
    """The system prompt and the tools end here."""


@dataclass(slots=True, eq=False)
class Cell:
    """A cell and all that is known of it."""

    number: int
    holders: int = 0
    """Open sequences that write it or go on from it, and the queue of those to be sealed."""
    epoch: int = 0
    """The newest step that may touch it."""
    prefix: Prefix | None = None
    """The block after which it is found."""
    position: int = 0
    """How many tokens are before it, once it is sealed."""
    conversation: int = 0
    """The first sequence that sealed one of its conversation, once it is sealed."""
    keep: Keep = Keep.WAYPOINT
    before: "Cell | None" = None
    """The cell from which its conversation would go on without it; None: from the beginning."""
    is_earlier_end: bool = False
    """Whether its conversation has a newer end."""
    last_use: int = 0
    dirty: bool = False
    """Whether it may hold memory of the system."""

    @property
    def is_cached(self) -> bool:
        """Return whether it can be found, and nobody holds it."""
        return self.prefix is not None and not self.holders

    @property
    def saves(self) -> int:
        """Return how many tokens would be computed again without it."""
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
    """Which physical block stands behind which block of a buffer: entry i behind block i.

    A record of the host alone. Kernels see plain addresses; the MMU is their block table.
    """

    blocks: list[Block] = field(default_factory=list)
    runs: list[MappedRun] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, blocks: Iterable[Block], writable: bool) -> list[MappedRun]:
        """Add blocks at the end; return the pieces to map, which may continue the last run."""
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
    """A buffer of the backend and what is mapped behind it. Reused, never destroyed::

    table: its sequence's blocks ............ | kept: of those before it | nothing
    mapped_blocks ............... | pending
    """

    number: int
    table: PageTable = field(default_factory=PageTable)
    pending: list[Pending] = field(default_factory=list)
    """The oldest first; what they map stands at the end of the table already."""
    kept: list[Block] = field(default_factory=list)
    """Mapped behind the table's last block, of no sequence any more: for the next one."""
    free_kept: int = 0
    """How many of these are free."""

    @property
    def mapped_blocks(self) -> int:
        """Return how many leading blocks can be used now."""
        return len(self.table) - sum(item.count for item in self.pending)

    def keeps_first(self, blocks: Iterable[Block]) -> int:
        """Return how many of the blocks are those that are kept, from the first one on."""
        same = takewhile(lambda pair: pair[0] is pair[1], zip(self.kept, blocks, strict=False))
        return sum(1 for _ in same)

    def own_kept(self, most: int) -> list[Block]:
        """Return the blocks, no more than so many, that its sequence can go on with: from the first
        kept one on those that are free, mapped nowhere else, and never were sealed."""
        usable = takewhile(
            lambda b: b.state is BlockState.FREE and len(b.keepers) == 1 and not b.is_sealed,
            self.kept[:most],
        )
        return list(usable)

    def mappings(self, regions: int) -> int:
        """Return how many mappings the system counts: each run in every region, and the gap behind
        it."""
        return regions * (len(self.table.runs) + 1) if self.table.blocks else 0


@dataclass(slots=True)
class PendingRelease:
    """Blocks whose memory is being released to the system."""

    ticket: int
    blocks: list[Block]


@dataclass(slots=True)
class SparseHeap:
    """One heap's blocks, in their order, and how many of them are free."""

    blocks: list[Block]
    free: int
    free_map: bytearray
    """1 for those that can be taken: room for a run is searched here, among thousands of blocks."""

    @classmethod
    def of(cls, number: int, blocks: int) -> "SparseHeap":
        """Return the heap of that number: its blocks are all free and hold no memory."""
        records = [Block(number, place) for place in range(blocks)]
        return cls(records, blocks, bytearray(b"\1") * blocks)

    def note_free(self, block: Block, is_free: bool) -> None:
        """Note that a block of this heap has become free, or is free no more."""
        self.free_map[block.place] = is_free
        self.free += 1 if is_free else -1

    def find_free(self, count: int = 1) -> int:
        """Return the first place of so many free blocks in a row; -1 where there are none."""
        return self.free_map.find(b"\1" * count)

    def states(self) -> bytes:
        return bytes(block.state for block in self.blocks)

    def free_and_dirty(self) -> list[int]:
        """Return the places of blocks that are free, mapped nowhere, and may hold memory."""
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
