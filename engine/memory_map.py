"""A snapshot of the engine's sequences and of their memory, for people. Counts only."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from engine.step.sequence import Sequence
from engine.types import EngineStats
from kvcache.memory_map import BlockRun as BlockRun
from kvcache.memory_map import BlockState as BlockState
from kvcache.memory_map import HeapSnapshot as HeapSnapshot
from kvcache.memory_map import KVMap as KVMap
from kvcache.memory_map import MappedSequence as MappedSequence

# Of the sequences that run, and of those that wait, so many are shown one by one.
MAX_SHOWN_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """How far a sequence is, in tokens, as GET /memory names them."""

    id: int
    """As KVMap's sequences have it in ``seq_id``."""
    status: str
    """A SequenceStatus."""
    prompt_tokens: int
    tokens: int
    """Of the prompt and those generated."""
    computed_tokens: int
    """Those whose K and V are in the cache."""
    most_tokens: int
    """Of prompt and answer, at most."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The engine between two steps. ``stats`` and ``kv`` are of the same moment."""

    stats: EngineStats
    kv: KVMap
    running: tuple[SequenceReport, ...]
    """The first ones in order; ``stats`` says how many there are."""
    waiting: tuple[SequenceReport, ...]


def report_first(sequences: SequenceOf[Sequence]) -> tuple[SequenceReport, ...]:
    """Return reports of the first sequences, no more than are shown one by one."""
    return tuple(
        SequenceReport(
            sequence.seq_id,
            sequence.status.value,
            sequence.num_prompt,
            sequence.num_tokens,
            sequence.num_computed,
            sequence.max_tokens,
            sequence.preemptions,
        )
        for sequence in islice(sequences, MAX_SHOWN_SEQUENCES)
    )
