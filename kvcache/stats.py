"""Statistics of the pool."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CellStats:
    """Cells by use. cells = free + held + cached + waiting."""

    cells: int = 0
    """0 where the model has no recurrent layers."""
    free: int = 0
    held: int = 0
    """Cells that open sequences write or go on from."""
    cached: tuple[tuple[str, int], ...] = ()
    """Cells that are kept for prefix hits, by retention."""
    waiting: int = 0
    """Cells that the device may still touch, and that are free then."""
    evicted: int = 0
    """Since the start."""
    cell_bytes: int = 0
    committed_bytes: int = 0


NO_CELLS = CellStats()


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes of the pool of K and V. capacity = free + live + partial tail + mapped ahead + cached +
    quarantined; committed is the system's own count."""

    capacity_bytes: int
    free_bytes: int
    live_bytes: int
    """Tokens of open sequences, those of the running step included."""
    partial_tail_bytes: int
    """The unused ends of blocks that hold live tokens."""
    mapped_ahead_bytes: int
    """Blocks of open sequences that hold no token yet."""
    cached_bytes: int
    """Blocks that no sequence owns, kept for prefix hits."""
    quarantined_bytes: int
    """Blocks that wait for the device, for unmapping, or for their release."""
    free_slack_bytes: int
    """Free blocks that may still hold memory of the system."""
    committed_bytes: int
    """Memory that the system charges, that of cells included."""
    num_heaps: int
    kept_heaps: int
    """Heaps whose memory stays with the process until it ends: all of them, or none."""
    num_sequences: int
    block_bytes: int
    block_tokens: int
    shared_saved_bytes: int
    """Bytes that sequences would need more if they shared no blocks."""
    evicted_blocks: int
    """Cached blocks that were evicted since the start."""
    mapped_blocks: int
    """Blocks that were mapped behind a buffer since the start, counted once for all regions."""
    unmapped_blocks: int
    """Blocks that were unmapped since the start."""
    cells: CellStats = NO_CELLS

    @property
    def used_bytes(self) -> int:
        """Return the bytes that are neither free nor kept for prefix hits."""
        return self.capacity_bytes - self.free_bytes - self.cached_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"cells": asdict(self.cells) | {"cached": dict(self.cells.cached)}}


def total(groups: Sequence[KVStats]) -> KVStats:
    """Return the sum over groups, except of sequences and the tokens of a block, which all groups
    share."""
    first, *others = groups
    if not others:
        return first
    same = {"num_sequences", "block_tokens", "cells"}
    return KVStats(
        **{
            name: getattr(first, name)
            if name in same
            else sum(getattr(group, name) for group in groups)
            for name in KVStats.__dataclass_fields__
        }
    )
