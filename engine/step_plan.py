"""The plan of a step, and the interface of what runs it."""

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

    def schedule(self) -> None:
        """Note in the sequence that the step will run."""
        sequence, stop = self.sequence, self.start + self.count
        sequence.num_scheduled = stop
        # The last token that is sampled is never computed.
        sequence.num_output_placeholders += self.samples and stop + 1 < sequence.max_tokens

    def cancel(self) -> None:
        """Note in the sequence that none of the steps in flight will commit."""
        self.sequence.num_scheduled = self.sequence.num_computed
        self.sequence.num_output_placeholders = 0

    @property
    def has_result(self) -> bool:
        """Return whether the step has a result for it."""
        return self.samples or bool(self.scores)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs; entries of one token come first."""

    entries: list[PlanEntry]
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that the system has no memory for, though nobody else has any."""
    begun: list[Request] = field(default_factory=list)
    """Requests whose first tokens are computed."""

    @property
    def prefill_tokens(self) -> int:
        """Return how many rows belong to entries that are chunks, not single decoded tokens."""
        return sum(entry.count for entry in self.entries if entry.count > 1)

    @property
    def decodes(self) -> bool:
        """Return whether it has single tokens, beside chunks or alone."""
        return bool(self.entries) and self.entries[0].count == 1


class RunningStep(Protocol):
    """A step from its plan to its results."""

    def submit(self) -> None:
        """Hands the device all that it has not got yet; may wait for room in its queue. Raises what
        ``StepRunner.begin`` raises."""

    def read(self) -> list[Sampled]:
        """Waits for the step: one result for each entry that has one, in order. Raises what
        ``StepRunner.begin`` raises."""

    def drop(self) -> None:
        """The step before this one has failed: nothing of it runs any more, and nobody will read
        it."""


class StepRunner(Protocol):
    """Runs plans: the model, or what stands for it in a simulation."""

    completed_epoch: int
    """The newest epoch that the device has finished."""

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> RunningStep:
        """Build the step. overlapped: the one before it has not been read. Then so much of this one
        is submitted at once that the device has work while that one is read; and the token of an
        entry whose sequence does not know it yet is the one that that step samples.

        Raises EngineFailedError where the device is lost. After any other error nothing of the step
        runs, and the one before it can still be read.
        """

    def release_cache(self) -> None:
        """Release memory that is kept for the next steps."""


def scored_positions(sequence: Sequence, end: int) -> range:
    """Return the positions before ``end`` that are still to be scored."""
    if sequence.request.params.prompt_logprobs is None:
        return NOTHING
    first = max(sequence.num_computed, len(sequence.scored))
    return range(first, min(end, sequence.num_prompt - 1))
