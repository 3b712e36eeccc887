"""What one step runs."""

from dataclasses import dataclass, field

from engine.types import Sequence


@dataclass(slots=True)
class PlanEntry:
    """Compute tokens [start, start + count) of a sequence; ``samples`` when that is all of them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs; entries of one token come first."""

    entries: list[PlanEntry]
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that the system has no memory for, though nobody else has any."""

    @property
    def prefill_tokens(self) -> int:
        """Rows of entries that are chunks, not single decoded tokens."""
        return sum(entry.count for entry in self.entries if entry.count > 1)
