"""A snapshot of the engine's sequences and their memory, as GET /memory sends it: counts only."""

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from engine.step.sequence import Sequence
from engine.types import EngineStats
from kvcache.memory_map import KVMap as KVMap

# Running sequences, and waiting ones, that are shown one by one.
MAX_SHOWN_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """A sequence's progress in tokens."""

    id: int
    """The ``seq_id`` of KVMap's sequences."""
    status: str
    """A SequenceStatus."""
    prompt_tokens: int
    tokens: int
    """Tokens of the prompt and generated ones."""
    computed_tokens: int
    """Tokens whose K and V are in the cache."""
    most_tokens: int
    """The limit of prompt and answer together."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The engine between two steps. ``stats`` and ``kv`` are of the same moment."""

    stats: EngineStats
    kv: KVMap
    running: tuple[SequenceReport, ...]
    """The first ones in order; ``stats`` has the number of all."""
    waiting: tuple[SequenceReport, ...]

    def as_json(self) -> dict[str, Any]:
        stats, pool = self.stats, self.stats.kv
        mapped = {sequence.seq_id: sequence for sequence in self.kv.sequences}
        blocks = ("mapped_blocks", "sealed_blocks", "borrowed_blocks")
        return self.kv.as_json() | {
            "pool": pool
            and asdict(pool) | {"cells": asdict(pool.cells) | {"cached": dict(pool.cells.cached)}},
            "shared_saved_bytes": 0 if pool is None else pool.shared_saved_bytes,
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "sequences": [
                asdict(report) | {name: getattr(mapped.get(report.id), name, 0) for name in blocks}
                for report in chain(self.running, self.waiting)
            ],
        }


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
