"""Statistics of the pool."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes of the pool. capacity = free + live + partial tail + mapped ahead + cached
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


def total(groups: Sequence[KVStats]) -> KVStats:
    """Return the statistics of all groups together: their sequences, and the tokens of a block, are
    the same ones."""
    first, *others = groups
    if not others:
        return first
    same = {"num_sequences", "block_tokens"}
    return KVStats(
        **{
            name: value if name in same else sum(getattr(its, name) for its in groups)
            for name, value in asdict(first).items()
        }
    )
