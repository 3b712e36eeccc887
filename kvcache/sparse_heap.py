"""One heap's blocks."""

from dataclasses import dataclass

from kvcache.block import Block


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
