"""A snapshot of the engine's sequences and memory for GET /memory, without texts or tokens."""

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from engine.step.sequence import Sequence
from engine.types import EngineStats, MissReason
from kvcache.inspector import KVMap as KVMap
from kvcache.inspector import MappedSequence

# A memory map lists at most this many running sequences, and at most this many waiting sequences.
MAX_SHOWN_SEQUENCES = 256
SequenceReport = dict[str, Any]
"""The JSON object that describes one sequence in the answer of GET /memory."""


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """A snapshot of the engine between two steps. All fields describe the same moment."""

    stats: EngineStats
    kv: KVMap
    running: tuple[SequenceReport, ...]
    """At most MAX_SHOWN_SEQUENCES running sequences. ``stats.running`` counts all of them."""
    waiting: tuple[SequenceReport, ...]

    def as_json(self) -> dict[str, Any]:
        stats, pool = self.stats, self.stats.kv
        groups = [{part.seq_id: part for part in group.sequences} for group in self.kv.groups]

        def blocks(seq_id: int) -> dict[str, Any]:
            """Return the blocks in the first group of layers, and in the others. A waiting sequence
            has none."""
            unmapped = MappedSequence(seq_id)
            first, *others = [parts.get(seq_id, unmapped).as_json() for parts in groups]
            return first | {"other_groups": others}

        return self.kv.as_json() | {
            "pool": pool and pool.as_json(),
            "disk": asdict(stats.disk),
            "shared_saved_bytes": 0 if pool is None else pool.shared_saved_bytes,
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "misses": {
                reason.value: {"count": stats.prefix_misses[reason], "message": reason.message}
                for reason in MissReason
            },
            "sequences": [
                report | blocks(report["id"]) for report in chain(self.running, self.waiting)
            ],
        }


def report_first(sequences: SequenceOf[Sequence]) -> tuple[SequenceReport, ...]:
    return tuple(
        {
            "id": sequence.seq_id,
            "status": sequence.status.value,
            "prompt_tokens": sequence.num_prompt,
            "tokens": sequence.num_tokens,
            "computed_tokens": sequence.num_computed,
            "most_tokens": sequence.max_tokens,
            "preemptions": sequence.preemptions,
        }
        for sequence in islice(sequences, MAX_SHOWN_SEQUENCES)
    )
