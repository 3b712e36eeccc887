"""One sequence's addresses, and which blocks stand behind them."""

from dataclasses import dataclass, field, replace

from kvcache.heap_pool import BlockRef


@dataclass(frozen=True, slots=True)
class MappedRun:
    """Blocks that take one mapping per region: consecutive in the buffer and in one heap."""

    block: int
    heap: int
    heap_block: int
    count: int


@dataclass(slots=True)
class PageTable:
    """Which physical block stands behind which block of a buffer: entry i behind block i.

    The truth of the host alone. Kernels see plain addresses; the MMU is their block table.
    """

    blocks: list[BlockRef] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.blocks)

    def runs(self, first: int = 0) -> list[MappedRun]:
        """The mappings of blocks ``first`` and beyond."""
        runs: list[MappedRun] = []
        for position, ref in enumerate(self.blocks[first:], first):
            if runs:
                last = runs[-1]
                if ref == (last.heap, last.heap_block + last.count):
                    runs[-1] = replace(last, count=last.count + 1)
                    continue
            runs.append(MappedRun(position, ref.heap, ref.place, 1))
        return runs


@dataclass(slots=True)
class SparseBuffer:
    """A buffer of the backend and what is mapped behind it. Reused, never destroyed."""

    number: int
    table: PageTable = field(default_factory=PageTable)

    def mappings(self, regions: int) -> int:
        """Mappings that the system counts: each run in every region, and the gap behind it."""
        return regions * (len(self.table.runs()) + 1)
