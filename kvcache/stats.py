"""Statistics of the pool."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CellStats:
    """Cells by use: cells = free + held + cached + waiting."""

    cells: int = 0
    free: int = 0
    held: int = 0
    """Cells that open sequences write or go on from."""
    cached: tuple[tuple[str, int], ...] = ()
    """Cells kept for prefix hits, by retention."""
    waiting: int = 0
    """Cells that become free when the device no longer touches them."""
    evicted: int = 0
    cell_bytes: int = 0
    committed_bytes: int = 0


NO_CELLS = CellStats()


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes of K and V: capacity = free + live + partial tail + mapped ahead + cached +
    quarantined. The system itself counts committed bytes."""

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
    """Free blocks that may hold memory of the system."""
    committed_bytes: int
    """Memory that the system charges, cells included."""
    num_heaps: int
    kept_heaps: int
    """Heaps that stay until the process ends: all or none."""
    num_sequences: int
    block_bytes: int
    block_tokens: int
    shared_saved_bytes: int
    """Bytes that sharing blocks saves."""
    evicted_blocks: int
    mapped_blocks: int
    """Blocks mapped since the start, counted once for all regions."""
    unmapped_blocks: int
    cells: CellStats = NO_CELLS

    @property
    def used_bytes(self) -> int:
        """Bytes that are neither free nor cached."""
        return self.capacity_bytes - self.free_bytes - self.cached_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"cells": asdict(self.cells) | {"cached": dict(self.cells.cached)}}


def total(groups: Sequence[KVStats]) -> KVStats:
    """Return the sum over groups, except for counts that all groups share."""
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
