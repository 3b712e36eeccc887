"""A snapshot of every block, for GET /memory: copied on the engine's thread, encoded elsewhere.

Block b of heap h has the number ``h * blocks_per_heap + b``."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcache.block import Block, BlockState, Cell
from kvcache.heap_pool import HeapPool
from kvcache.layout import KVLayout
from kvcache.sequences import CachedSequence

# One letter per BlockState, in their order; and one for a free block that may hold memory.
LETTERS = "fosqcr"
FREE_WITH_MEMORY = "d"
NO_SEQUENCE = -1


class MappedSequence(NamedTuple):
    """An open sequence and its blocks."""

    seq_id: int
    runs: tuple[tuple[int, int], ...]
    """``(first block, count)`` in the order of the tokens, pending blocks included."""
    mapped_blocks: int
    sealed_blocks: int
    borrowed_blocks: int
    """Leading blocks that other sequences wrote."""


class SealedCell(NamedTuple):
    """A sealed cell, with the names of GET /memory."""

    conversation: int
    position: int
    keep: str
    holders: int


@dataclass(frozen=True, slots=True)
class KVMap:
    """The pool at one moment."""

    geometry: dict[str, int]
    heaps: tuple[str, ...]
    """A string per heap with a letter per block: f free, d free with memory of the system, o owned,
    s sealed, q quarantined, c cached, r releasing."""
    sharers: "array[int]"
    """The number of open sequences of each block."""
    sequences: tuple[MappedSequence, ...]
    """The open sequences, the oldest one first."""
    cells: tuple[SealedCell, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the map as GET /memory sends it. Takes a few milliseconds for 100 000 blocks."""
        return {
            "geometry": self.geometry,
            "heaps": self.heaps,
            # "owners" holds indices of this list.
            "owner_ids": [sequence.seq_id for sequence in self.sequences],
            "owners": self.owner_runs(),
            "sharers": self.sharer_runs(),
            "cells": [cell._asdict() for cell in self.cells],
        }

    def owner_runs(self) -> list[int]:
        """Return the oldest sequence of each block as runs ``[owner, count, owner, count, ...]``
        over all blocks. An owner is an index of ``sequences``; -1: no open sequence."""
        owners = np.full(len(self.sharers), NO_SEQUENCE, np.int32)
        for number in reversed(range(len(self.sequences))):
            for first, count in self.sequences[number].runs:
                owners[first : first + count] = number
        starts, counts = _equal_runs(owners)
        return _rows(owners[starts], counts)

    def sharer_runs(self) -> list[int]:
        """Return runs of shared blocks, ``[gap, count, sequences, gap, ...]``, with gaps in
        blocks."""
        sharers = np.asarray(self.sharers, np.int32)
        starts, counts = _equal_runs(sharers)
        shared = sharers[starts] > 1
        starts, counts = starts[shared], counts[shared]
        ends_before = np.append(0, starts + counts)[: len(starts)]
        return _rows(starts - ends_before, counts, sharers[starts])


def take_map(
    layout: KVLayout, pool: HeapPool, sequences: Iterable[CachedSequence], cells: Iterable[Cell]
) -> KVMap:
    """Return a copy of the pool's state that is small enough not to delay the engine.

    pool: of the first group. Block states are alike in all groups, unless a mapping was refused."""
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
    """Return the first indices and the lengths of runs of equal values."""
    changes = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([np.zeros(min(1, len(values)), np.intp), changes])
    return starts, np.diff(np.append(starts, len(values)))


def _rows(*columns: np.ndarray) -> list[int]:
    """Return the rows of a table, one after the other."""
    numbers: list[int] = np.stack(columns, axis=1).ravel().tolist()
    return numbers
