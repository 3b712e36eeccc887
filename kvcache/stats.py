"""Statistics of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellStats:
    """Cells, by what they are for. cells = free + held + cached + waiting."""

    cells: int = 0
    """0 where the model has no recurrent layers."""
    free: int = 0
    held: int = 0
    """By open sequences, which go on from them or write them."""
    cached: tuple[tuple[str, int], ...] = ()
    """Kept for prefix hits, and held by nobody: how many for each reason."""
    waiting: int = 0
    """For the device, which may still touch them; free then."""
    evicted: int = 0
    """Since the start, for room or after a while."""
    cell_bytes: int = 0
    committed_bytes: int = 0


NO_CELLS = CellStats()


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes of the pool of K and V. capacity = free + live + partial tail + mapped ahead + cached
    + quarantined; committed is what the system charges, whatever the pool thinks."""

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
    """Blocks that wait for the device, for unmapping, or for their way back to the system."""
    free_slack_bytes: int
    """Free blocks that may still hold memory of the system."""
    committed_bytes: int
    """Of cells as well."""
    num_heaps: int
    kept_heaps: int
    """Those whose memory stays with the process until it ends: all of them, or none."""
    num_sequences: int
    block_bytes: int
    block_tokens: int
    shared_saved_bytes: int
    """What blocks that sequences share would take beside what they take, if none was shared."""
    evicted_blocks: int
    """Cached blocks that were forgotten since the start, for room or after a while."""
    mapped_blocks: int
    """Blocks that were mapped behind a sequence's addresses since the start, however many regions
    and sequences have them."""
    unmapped_blocks: int
    """Those that were taken from there again."""
    cells: CellStats = NO_CELLS

    @property
    def used_bytes(self) -> int:
        """What is neither free nor kept for prefix hits."""
        return self.capacity_bytes - self.free_bytes - self.cached_bytes


def total(groups: Sequence[KVStats]) -> KVStats:
    """Return the statistics of all groups together: their sequences, and the tokens of a block, are
    the same ones."""
    first, *others = groups
    if not others:
        return first
    same = {"num_sequences", "block_tokens", "cells"}
    return KVStats(
        **{
            name: getattr(first, name)
            if name in same
            else sum(getattr(its, name) for its in groups)
            for name in KVStats.__dataclass_fields__
        }
    )
