"""A snapshot of every block's state and sequences, for people."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.block import BlockState as BlockState
from kvcache.cell_pool import Cell
from kvcache.heap_pool import HeapPool
from kvcache.layout import KVLayout
from kvcache.sequences import CachedSequence
from kvcache.sparse_heap import SparseHeap


class BlockRun(NamedTuple):
    """Consecutive blocks of a heap that one sequence has."""

    heap: int
    place: int
    blocks: int


@dataclass(frozen=True, slots=True)
class HeapSnapshot:
    """One heap's blocks, an element for each."""

    states: bytes
    """Their BlockState."""
    dirty: bytes
    """1 for those that may hold memory of the system."""
    sharers: bytes
    """How many open sequences have them: numbers of two bytes in the machine's order."""


@dataclass(frozen=True, slots=True)
class MappedSequence:
    """A sequence with a buffer."""

    seq_id: int
    runs: tuple[BlockRun, ...]
    """In the order of its tokens, blocks that are being mapped ahead included."""
    mapped_blocks: int
    """Those of ``runs``."""
    sealed_blocks: int
    """Leading ones that are never written again."""
    borrowed_blocks: int
    """Leading ones that other sequences wrote."""


class SealedCell(NamedTuple):
    """The states of recurrent layers at one position, which any sequence may go on from."""

    conversation: int
    """The first sequence of its conversation."""
    position: int
    """How many tokens are before it."""
    keep: str
    """The name of a Keep, in small letters."""
    holders: int
    """How many have it now; 0: it is cached."""


@dataclass(frozen=True, slots=True)
class KVMap:
    """The pool at one moment."""

    block_bytes: int
    tokens_per_block: int
    blocks_per_heap: int
    page_bytes: int
    regions: int
    max_heaps: int
    heaps: tuple[HeapSnapshot, ...]
    """Those that have been made."""
    sequences: tuple[MappedSequence, ...]
    """The open ones, who came first before others."""
    cells: tuple[SealedCell, ...] = ()
    """Those that can be found; none where the model has no recurrent layers."""


def take_map(
    layout: KVLayout,
    pool: HeapPool,
    open_sequences: Iterable[CachedSequence],
    cells: Iterable[Cell],
) -> KVMap:
    """Return a copy of the pool's state: some bytes for each block and some numbers for each run,
    so that the engine soon goes on. Others work out what it means.

    pool: of the first group. What others have of the same tokens is in the same state, unless the
    system has refused it, and counts as part of its blocks.
    """
    group = layout.groups[0]
    return KVMap(
        block_bytes=layout.block_bytes,
        tokens_per_block=group.tokens_per_block,
        blocks_per_heap=group.blocks_per_heap,
        page_bytes=group.page_bytes,
        regions=sum(len(its.regions) for its in layout.groups),
        max_heaps=max(pool.num_heaps, -(-pool.capacity_blocks // group.blocks_per_heap)),
        heaps=tuple(map(_snapshot, pool.heaps)),
        sequences=tuple(_mapped(sequence) for sequence in open_sequences),
        cells=tuple(
            SealedCell(cell.conversation, cell.position, cell.keep.name.lower(), cell.holders)
            for cell in cells
            if cell.prefix is not None
        ),
    )


def _snapshot(heap: SparseHeap) -> HeapSnapshot:
    return HeapSnapshot(
        states=heap.states(),
        dirty=bytes(block.dirty for block in heap.blocks),
        sharers=array("H", [block.sequences for block in heap.blocks]).tobytes(),
    )


def _mapped(sequence: CachedSequence) -> MappedSequence:
    table = sequence.buffer.table
    return MappedSequence(
        seq_id=sequence.seq_id,
        runs=tuple(BlockRun(run.heap, run.heap_block, run.count) for run in table.runs),
        mapped_blocks=len(table),
        sealed_blocks=sequence.sealed_blocks,
        borrowed_blocks=sequence.shared_blocks,
    )
