"""Invariants of a memory map."""

from collections import Counter

from kvcache.memory_map import KVMap
from kvcache.stats import KVStats


def expanded(runs: list[int]) -> list[int]:
    """As the page reads ``owners``."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [owner for owner, count in pairs for _ in range(count)]


def map_adds_up(found: KVMap, stats: KVStats) -> None:
    """The map and the figures of the same moment say the same. Raises AssertionError."""
    geometry, blocks = found.geometry, Counter("".join(found.heaps))
    size = geometry["block_bytes"]
    unmade = (geometry["max_heaps"] - len(found.heaps)) * geometry["blocks_per_heap"]
    assert (blocks.total() + unmade) * size == stats.capacity_bytes
    assert (blocks["f"] + blocks["d"] + unmade) * size == stats.free_bytes
    assert blocks["d"] * size == stats.free_slack_bytes
    assert blocks["c"] * size == stats.cached_bytes
    assert (blocks["q"] + blocks["r"]) * size == stats.quarantined_bytes
    held = stats.live_bytes + stats.partial_tail_bytes + stats.mapped_ahead_bytes
    assert (blocks["o"] + blocks["s"]) * size == held
    assert len(found.heaps) == stats.num_heaps
    assert len(found.sequences) == stats.num_sequences
    _has_what_sequences_have(found)


def _has_what_sequences_have(found: KVMap) -> None:
    """A block is counted once for each sequence that has it."""
    having = Counter(
        first + offset
        for sequence in found.sequences
        for first, count in sequence.runs
        for offset in range(count)
    )
    assert [having[block] for block in range(len(found.sharers))] == found.sharers.tolist()
    for sequence in found.sequences:
        assert sequence.mapped_blocks == sum(count for _, count in sequence.runs)
