"""Invariants of a memory map."""

from collections import Counter

from kvcache.inspector import GroupMap, KVMap
from kvcache.stats import KVStats


def expanded(runs: list[int]) -> list[int]:
    """As the page reads ``owners``."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [owner for owner, count in pairs for _ in range(count)]


def map_adds_up(found: KVMap, stats: KVStats) -> None:
    """The map and the figures of the same moment say the same. Raises AssertionError."""
    sizes = Counter[str]()
    for group in found.groups:
        geometry = group.geometry
        unmade = (geometry["max_heaps"] - len(group.heaps)) * geometry["blocks_per_heap"]
        for letter in "".join(group.heaps) + unmade * "f":
            sizes[letter] += geometry["block_bytes"]
        assert len(group.sequences) == stats.num_sequences
        _has_what_sequences_have(group)
    assert sizes.total() == stats.capacity_bytes
    assert sizes["f"] + sizes["d"] == stats.free_bytes
    assert sizes["d"] == stats.free_slack_bytes
    assert sizes["c"] == stats.cached_bytes
    assert sizes["q"] + sizes["r"] == stats.quarantined_bytes
    held = stats.live_bytes + stats.partial_tail_bytes + stats.mapped_ahead_bytes
    assert sizes["o"] + sizes["s"] == held
    assert sum(len(group.heaps) for group in found.groups) == stats.num_heaps


def _has_what_sequences_have(found: GroupMap) -> None:
    """A block is counted once for each sequence that has it."""
    having = Counter(
        first + offset
        for sequence in found.sequences
        for first, count in sequence.runs
        for offset in range(count)
    )
    assert [having[block] for block in range(len(found.sharers))] == found.sharers.tolist()
