"""What is always true of a memory map."""

from array import array
from collections import Counter

from kvcache.memory_map import BlockState, KVMap
from kvcache.stats import KVStats


def bytes_by_state(found: KVMap) -> Counter[BlockState]:
    """Bytes of the blocks of made heaps in each state."""
    blocks = Counter(BlockState(state) for heap in found.heaps for state in heap.states)
    return Counter({state: count * found.block_bytes for state, count in blocks.items()})


def map_adds_up(found: KVMap, stats: KVStats) -> None:
    """The map and the figures of the same moment say the same. Raises AssertionError."""
    size = bytes_by_state(found)
    unmade = (found.max_heaps - len(found.heaps)) * found.blocks_per_heap * found.block_bytes
    assert sum(size.values()) + unmade == stats.capacity_bytes
    assert size[BlockState.FREE] + unmade == stats.free_bytes
    assert size[BlockState.CACHED] == stats.cached_bytes
    waiting = size[BlockState.QUARANTINED] + size[BlockState.RELEASING]
    assert waiting == stats.quarantined_bytes
    held = stats.live_bytes + stats.partial_tail_bytes + stats.mapped_ahead_bytes
    assert size[BlockState.OWNED] + size[BlockState.SEALED] == held
    assert len(found.heaps) == stats.num_heaps
    assert len(found.sequences) == stats.num_sequences
    slack = sum(
        dirty and state == BlockState.FREE
        for heap in found.heaps
        for state, dirty in zip(heap.states, heap.dirty, strict=True)
    )
    assert slack * found.block_bytes == stats.free_slack_bytes
    _has_what_sequences_have(found)


def _has_what_sequences_have(found: KVMap) -> None:
    """A block is counted once for each sequence that has it."""
    having = Counter(
        (run.heap, run.place + offset)
        for sequence in found.sequences
        for run in sequence.runs
        for offset in range(run.blocks)
    )
    for number, heap in enumerate(found.heaps):
        sharers = array("H", heap.sharers)
        assert [having[number, place] for place in range(len(sharers))] == list(sharers)
    for sequence in found.sequences:
        assert sequence.mapped_blocks == sum(run.blocks for run in sequence.runs)
