"""One heap's blocks: the state and the sharers of each."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class BlockRef(NamedTuple):
    """A physical block: its heap's number and its place in the heap."""

    heap: int
    place: int


class BlockState(IntEnum):
    """The state of a block."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True)
class PendingRelease:
    """Blocks whose memory is being released to the system."""

    ticket: int
    blocks: list[BlockRef]


@dataclass(slots=True)
class SparseHeap:
    """One heap's blocks. ``dirty`` marks those that may hold memory of the system."""

    states: bytearray
    dirty: bytearray
    buffers: "array[int]"
    """How many buffers have the block mapped, those of closed sequences included."""
    sequences: "array[int]"
    """How many open sequences have it."""
    free: int

    def attach(self, place: int) -> bool:
        """Count one more sequence that has the block; return whether others have it as well."""
        self.buffers[place] += 1
        self.sequences[place] += 1
        return self.sequences[place] > 1

    def detach(self, place: int) -> bool:
        """Count one sequence less, not its buffer; return whether others have the block."""
        self.sequences[place] -= 1
        return self.sequences[place] > 0

    @classmethod
    def of(cls, blocks: int) -> "SparseHeap":
        """Return a heap whose blocks are all free and hold no memory."""
        counts = array("H", bytes(2 * blocks))
        return cls(bytearray(blocks), bytearray(blocks), counts, counts[:], blocks)

    def commit(self, places: Iterable[int]) -> int:
        """Note that blocks take memory of the system; return how many free ones had none before."""
        clean = [place for place in places if not self.dirty[place]]
        for place in clean:
            self.dirty[place] = True
        return sum(self.states[place] == BlockState.FREE for place in clean)

    def free_and_dirty(self) -> list[int]:
        """Return the places of blocks that are free and may hold memory."""
        both = zip(self.states, self.dirty, strict=True)
        return [i for i, (state, dirty) in enumerate(both) if dirty and state == BlockState.FREE]


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """Return the longest runs ``(first, count)`` of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
