"""A snapshot of every block, for GET /memory. A thread other than the engine's encodes it.

Block b of heap h has the number ``h * blocks_per_heap + b`` in the snapshot."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvcache.layout import Group
from kvcache.pool import HeapPool
from kvcache.records import Block, BlockState
from kvcache.sequences import SequenceBlocks
from kvcache.slots import Slot

# The letter of each BlockState, by the state's value. Free blocks with memory have another letter.
LETTERS = "fosqcr"
FREE_WITH_MEMORY = "d"
NO_SEQUENCE = -1


class MappedSequence(NamedTuple):
    """An open sequence and its blocks."""

    seq_id: int
    runs: tuple[tuple[int, int], ...] = ()
    """``(first block, number of blocks)`` of adjacent blocks in token order. Blocks whose mapping
    is queued are included."""
    first_block: int = 0
    """The number of empty places before the first of these blocks: a window has left them."""
    sealed_blocks: int = 0
    borrowed_blocks: int = 0
    """The number of leading blocks that other sequences wrote and this sequence shares."""

    def as_json(self) -> dict[str, Any]:
        return {
            "first_block": self.first_block,
            "mapped_blocks": sum(count for _, count in self.runs),
            "sealed_blocks": self.sealed_blocks,
            "borrowed_blocks": self.borrowed_blocks,
        }


class SealedSlot(NamedTuple):
    """A sealed state slot (recurrent states kept for reuse), with GET /memory's field names."""

    conversation: int
    position: int
    keep: str
    holders: int


@dataclass(frozen=True, slots=True)
class GroupMap:
    """All blocks and open sequences of a group of layers at one moment."""

    geometry: dict[str, int]
    heaps: tuple[str, ...]
    """One string per heap with a letter per block: f free, d free but occupying memory, o owned, s
    sealed, q quarantined, c cached, r releasing."""
    sharers: "array[int]"
    """The number of open sequences that use each block, by the number of the block."""
    sequences: tuple[MappedSequence, ...]
    """The open sequences, the oldest one first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "geometry": self.geometry,
            "heaps": self.heaps,
            # "owners" holds indices of this list.
            "owner_ids": [sequence.seq_id for sequence in self.sequences],
            "owners": self.owner_runs(),
            "sharers": self.sharer_runs(),
        }

    def owner_runs(self) -> list[int]:
        """Return the owners of all blocks as ``[owner, count, owner, count, ...]``. An owner is the
        oldest open sequence that uses a block, as an index of ``sequences``, or -1 if none does."""
        owners = np.full(len(self.sharers), NO_SEQUENCE, np.int32)
        for number in reversed(range(len(self.sequences))):
            for first, count in self.sequences[number].runs:
                owners[first : first + count] = number
        starts, counts = _equal_runs(owners)
        return _rows(owners[starts], counts)

    def sharer_runs(self) -> list[int]:
        """Return the shared blocks as ``[gap, count, sequences, gap, ...]``: after ``gap`` other
        blocks, ``count`` blocks are each used by ``sequences`` sequences."""
        sharers = np.asarray(self.sharers, np.int32)
        starts, counts = _equal_runs(sharers)
        shared = sharers[starts] > 1
        starts, counts = starts[shared], counts[shared]
        ends_before = np.append(0, starts + counts)[: len(starts)]
        return _rows(starts - ends_before, counts, sharers[starts])


@dataclass(slots=True)
class KVMap:
    """All blocks, open sequences and sealed state slots at one moment. Groups add their parts."""

    groups: list[GroupMap] = field(default_factory=list)
    slots: list[SealedSlot] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as GET /memory sends it: the first group of layers, and beside it the
        others. 100 000 blocks take a few milliseconds."""
        first, *others = self.groups
        return first.as_json() | {
            "other_groups": [group.as_json() for group in others],
            "slots": [slot._asdict() for slot in self.slots],
        }


def map_blocks(group: Group, pool: HeapPool, sequences: Iterable[SequenceBlocks]) -> GroupMap:
    """Return a copy of all blocks' states. Copying takes little of the engine's time."""
    size = group.blocks_per_heap
    return GroupMap(
        geometry={
            "block_bytes": group.block_bytes,
            "tokens_per_block": group.tokens_per_block,
            "blocks_per_heap": size,
            "page_bytes": group.page_bytes,
            "regions": len(group.regions),
            "window": group.window,
            "max_heaps": max(len(pool.heaps), -(-pool.capacity_blocks // size)),
        },
        heaps=tuple("".join(map(letter_of, heap.blocks)) for heap in pool.heaps),
        sharers=array("H", [block.sequences for heap in pool.heaps for block in heap.blocks]),
        sequences=tuple(
            MappedSequence(
                own.sequence.seq_id,
                tuple((r.heap * size + r.heap_block, r.count) for r in own.buffer.table.runs),
                own.table.first,
                own.sealed_blocks - own.table.first,
                own.shared_blocks,
            )
            for own in sequences
        ),
    )


def map_slots(slots: Iterable[Slot]) -> list[SealedSlot]:
    return [
        SealedSlot(slot.conversation, slot.position, slot.retention.name.lower(), slot.holders)
        for slot in slots
        if slot.digest is not None
    ]


def letter_of(block: Block) -> str:
    if block.dirty and block.state is BlockState.FREE:
        return FREE_WITH_MEMORY
    return LETTERS[block.state]


def _equal_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    changes = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([np.zeros(min(1, len(values)), np.intp), changes])
    return starts, np.diff(np.append(starts, len(values)))


def _rows(*columns: np.ndarray) -> list[int]:
    """Given a table's columns, return its numbers row by row."""
    numbers: list[int] = np.stack(columns, axis=1).ravel().tolist()
    return numbers
