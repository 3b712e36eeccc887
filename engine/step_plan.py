"""What one step runs, and who runs it."""

from dataclasses import dataclass, field
from typing import Protocol

from engine.types import Request, Sampled, Sequence

NOTHING = range(0)


@dataclass(slots=True)
class PlanEntry:
    """Compute tokens [start, start + count) of a sequence; ``samples`` when that is all of them."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    scores: range = NOTHING
    """Positions of the chunk at which the log-probability of the prompt's next token is wanted."""

    @property
    def has_result(self) -> bool:
        """Whether the step says something of it."""
        return self.samples or bool(self.scores)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs; entries of one token come first."""

    entries: list[PlanEntry]
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that the system has no memory for, though nobody else has any."""
    begun: list[Request] = field(default_factory=list)
    """Whose first tokens are computed."""

    @property
    def prefill_tokens(self) -> int:
        """Rows of entries that are chunks, not single decoded tokens."""
        return sum(entry.count for entry in self.entries if entry.count > 1)


class StepRunner(Protocol):
    """Runs plans: the model, or what stands for it in a simulation."""

    completed_epoch: int
    """The newest epoch that the device has finished."""

    def run(self, plan: StepPlan) -> list[Sampled]:
        """One result for each entry that has one, in order. Raises EngineFailedError where the
        device is lost."""

    def free_cache(self) -> None:
        """Memory that is kept for the next steps goes back to the system."""


def scored_positions(sequence: Sequence, end: int) -> range:
    """Which positions before ``end`` are still to be asked for the prompt's next token."""
    if sequence.request.params.prompt_logprobs is None:
        return NOTHING
    first = max(sequence.num_computed, len(sequence.scored))
    return range(first, min(end, sequence.num_prompt - 1))
