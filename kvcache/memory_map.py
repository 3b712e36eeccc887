"""A snapshot of every block, for GET /memory: copied on the engine's thread, encoded elsewhere.

Blocks are numbered heap by heap: block b of heap h is ``h * blocks_per_heap + b``.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcache.block import Block, BlockState, Cell
from kvcache.heap_pool import HeapPool
from kvcache.layout import KVLayout
from kvcache.sequences import CachedSequence

# A letter for each BlockState, in their order, and one for a free block that may hold memory.
LETTERS = "fosqcr"
FREE_WITH_MEMORY = "d"
NO_SEQUENCE = -1


class MappedSequence(NamedTuple):
    """An open sequence, with the number of its leading blocks of each kind."""

    seq_id: int
    runs: tuple[tuple[int, int], ...]
    """``(first block, count)`` in the order of its tokens, premapped blocks included."""
    mapped_blocks: int
    """All blocks of ``runs``."""
    sealed_blocks: int
    """Blocks that are never written again."""
    borrowed_blocks: int
    """Blocks that other sequences wrote."""


class SealedCell(NamedTuple):
    """A state that any sequence may go on from, as GET /memory names it."""

    conversation: int
    position: int
    keep: str
    holders: int


@dataclass(frozen=True, slots=True)
class KVMap:
    """The pool at one moment."""

    geometry: dict[str, int]
    heaps: tuple[str, ...]
    """A string for each heap, with a letter for each block: f free, d free with memory of the
    system, o owned, s sealed, q quarantined, c cached, r releasing."""
    sharers: "array[int]"
    """The number of open sequences that have each block."""
    sequences: tuple[MappedSequence, ...]
    """The open sequences in the order in which they came."""
    cells: tuple[SealedCell, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the map as GET /memory sends it. A few milliseconds for 100 000 blocks."""
        return {
            "geometry": self.geometry,
            "heaps": self.heaps,
            # Numbers of sequences, in the order in which they came; "owners" counts places in it.
            "owner_ids": [sequence.seq_id for sequence in self.sequences],
            "owners": self.owner_runs(),
            "sharers": self.sharer_runs(),
            "cells": [cell._asdict() for cell in self.cells],
        }

    def owner_runs(self) -> list[int]:
        """Return the first sequence of each block: ``[owner, count, owner, count, ...]`` over all
        blocks, where -1 is no open sequence."""
        owners = np.full(len(self.sharers), NO_SEQUENCE, np.int32)
        for number in reversed(range(len(self.sequences))):
            for first, count in self.sequences[number].runs:
                owners[first : first + count] = number
        starts, counts = _equal_runs(owners)
        return _rows(owners[starts], counts)

    def sharer_runs(self) -> list[int]:
        """Return blocks that more than one sequence has: ``[gap, count, sequences, gap, ...]``,
        where a gap is the blocks since the run before."""
        sharers = np.asarray(self.sharers, np.int32)
        starts, counts = _equal_runs(sharers)
        shared = sharers[starts] > 1
        starts, counts = starts[shared], counts[shared]
        ends_before = np.append(0, starts + counts)[: len(starts)]
        return _rows(starts - ends_before, counts, sharers[starts])


def take_map(
    layout: KVLayout, pool: HeapPool, sequences: Iterable[CachedSequence], cells: Iterable[Cell]
) -> KVMap:
    """Return a copy of the pool's state: some bytes for each block and some numbers for each run,
    so that the engine goes on soon.

    pool: of the first group. The blocks of other groups that hold the same tokens are in the same
    state, unless the system has refused one, and count as part of the first group's blocks.
    """
    group = layout.groups[0]
    size = group.blocks_per_heap
    return KVMap(
        geometry={
            "block_bytes": layout.block_bytes,
            "tokens_per_block": group.tokens_per_block,
            "blocks_per_heap": size,
            "page_bytes": group.page_bytes,
            "regions": sum(len(each.regions) for each in layout.groups),
            "max_heaps": max(len(pool.heaps), -(-pool.capacity_blocks // size)),
        },
        heaps=tuple("".join(map(letter_of, heap.blocks)) for heap in pool.heaps),
        sharers=array("H", [block.sequences for heap in pool.heaps for block in heap.blocks]),
        sequences=tuple(
            MappedSequence(
                sequence.seq_id,
                tuple((r.heap * size + r.heap_block, r.count) for r in sequence.buffer.table.runs),
                len(sequence.buffer.table),
                sequence.sealed_blocks,
                sequence.shared_blocks,
            )
            for sequence in sequences
        ),
        cells=tuple(
            SealedCell(cell.conversation, cell.position, cell.retention.name.lower(), cell.holders)
            for cell in cells
            if cell.prefix is not None
        ),
    )


def letter_of(block: Block) -> str:
    if block.dirty and block.state is BlockState.FREE:
        return FREE_WITH_MEMORY
    return LETTERS[block.state]


def _equal_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of equal values begin, and how long they are."""
    changes = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([np.zeros(min(1, len(values)), np.intp), changes])
    return starts, np.diff(np.append(starts, len(values)))


def _rows(*columns: np.ndarray) -> list[int]:
    """Return the rows of a table, one after the other."""
    numbers: list[int] = np.stack(columns, axis=1).ravel().tolist()
    return numbers
