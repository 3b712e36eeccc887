"""One heap's blocks."""

from dataclasses import dataclass

from kvcache.block import Block, BlockState


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

    @classmethod
    def of(cls, number: int, blocks: int) -> "SparseHeap":
        """Return the heap of that number: its blocks are all free and hold no memory."""
        return cls([Block(number, place) for place in range(blocks)], blocks)

    def states(self) -> bytes:
        """Return every block's BlockState, a byte each."""
        return bytes(block.state for block in self.blocks)

    def free_and_dirty(self) -> list[int]:
        """Return the places of blocks that are free and may hold memory."""
        return [b.place for b in self.blocks if b.dirty and b.state is BlockState.FREE]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Return the longest runs ``(first, count)`` of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
