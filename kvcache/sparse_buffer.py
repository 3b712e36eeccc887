"""A sequence's address range, and the page table behind it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from kvcache.block import Block, BlockState


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
