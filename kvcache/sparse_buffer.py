"""A sequence's address range, and the page table behind it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcache.block import Block


@dataclass(slots=True)
class MappedRun:
    """Blocks that take one mapping per region: consecutive in the buffer and in one heap."""

    block: int
    heap: int
    heap_block: int
    count: int
    writable: bool

    def grows_by(self, block: Block, writable: bool) -> bool:
        """Return whether the block continues the run."""
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


@dataclass(slots=True)
class SparseBuffer:
    """A buffer of the backend and what is mapped behind it. Reused, never destroyed."""

    number: int
    table: PageTable = field(default_factory=PageTable)
    pending: list[Pending] = field(default_factory=list)
    """The oldest first; what they map stands at the end of the table already."""

    @property
    def mapped_blocks(self) -> int:
        """Return how many leading blocks can be used now."""
        return len(self.table) - sum(item.count for item in self.pending)

    def mappings(self, regions: int) -> int:
        """Return how many mappings the system counts: each run in every region, and the gap behind
        it."""
        return regions * (len(self.table.runs) + 1) if self.table.blocks else 0
