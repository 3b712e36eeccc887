"""The plan of a step and its outcomes: values, without anything that lives in the engine.

A plan can be recorded, replayed, and sent to another process.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from engine.types import NO_TURNS, PrefixSalt, SamplingParams, TokenEvent, TokenLogprobs, Turns

WORD_BITS = 32

# --- decisions of the cache -----------------------------------------------------------------------


class Opened(NamedTuple):
    """A sequence got a buffer, with the cached blocks that it begins with."""

    seq_id: int
    token_ids: tuple[int, ...]
    salt: PrefixSalt
    num_reusable: int | None
    """How many of its leading tokens' K and V may come from others; None: all but the last's."""
    num_tokens: int
    """Tokens that blocks are set aside for."""
    final_tokens: int
    system_tokens: int
    turns: Turns = NO_TURNS


class Attached(NamedTuple):
    """A sequence shares blocks that other sequences have computed."""

    seq_id: int
    num_computed: int
    """Its leading tokens that have valid K and V now."""


class Forked(NamedTuple):
    """A sequence shares its parent's blocks, and has a copy of the partial one."""

    parent_id: int
    seq_id: int
    num_computed: int


class Closed(NamedTuple):
    """A sequence has ended, or was preempted, and its memory is freed."""

    seq_id: int
    keep_prefix: bool
    preempted: bool


CacheDecision = Opened | Attached | Forked | Closed


# --- the entries of a step ------------------------------------------------------------------------


class PendingToken(NamedTuple):
    """The token that a row of the step before samples. That step has not been read yet."""

    step: int
    row: int
    """Its place among the rows that sample."""


class Sampling(NamedTuple):
    """How the token after an entry's last one is chosen."""

    params: SamplingParams
    num_generated: int
    """Tokens of the answer before it."""
    needs_state: bool = False
    """Whether it depends on the tokens before it in another way than through the model: then it
    waits until they have been read."""


class Scoring(NamedTuple):
    """Tokens of the prompt whose log-probabilities an entry gives."""

    start: int
    """The position before the first of them."""
    next_tokens: tuple[int, ...]
    num_top: int
    """How many alternatives to report with each."""


class PlanEntry(NamedTuple):
    """Compute tokens [start, start + count) of a sequence."""

    seq_id: int
    start: int
    count: int  # type: ignore[assignment]  # not the method of tuples
    tokens: tuple[int, ...] | PendingToken
    sampling: Sampling | None = None
    """Where the step samples the token that follows, or makes the vector of them all."""
    scoring: Scoring | None = None

    @property
    def has_outcome(self) -> bool:
        """Return whether anything but K and V comes of it."""
        return self.sampling is not None or self.scoring is not None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step; entries of one token come first."""

    number: int
    """Counts up."""
    entries: tuple[PlanEntry, ...]
    decisions: tuple[CacheDecision, ...] = ()
    """The cache's decisions since the plan before, in order."""
    begun: tuple[float | None, ...] = ()
    """When each request was submitted whose first tokens are computed."""
    refused: tuple[TokenEvent, ...] = ()
    """Ends of sequences that the system has no memory for, though no others are left."""

    @property
    def prefill_tokens(self) -> int:
        """Return how many rows belong to entries that are chunks, not single decoded tokens."""
        return sum(entry.count for entry in self.entries if entry.count > 1)

    @property
    def decodes(self) -> bool:
        """Return whether it has single tokens, beside chunks or alone."""
        return bool(self.entries) and self.entries[0].count == 1

    @property
    def needs_state(self) -> bool:
        """Return whether choosing its tokens waits until the step before has been read."""
        return any(e.sampling is not None and e.sampling.needs_state for e in self.entries)

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """Return ``(seq_id, start, count)`` of each entry, as the cache wants them."""
        return [entry[:3] for entry in self.entries]


NO_STEP = StepPlan(0, ())

# --- the state for choosing tokens ----------------------------------------------------------------


class TokenHistory(NamedTuple):
    """Distinct tokens of a sequence, for penalties."""

    ids: np.ndarray
    """int32"""
    generated: np.ndarray
    """float32: how often each was generated; 0 means that only the prompt has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Which tokens may come next, one bit each."""

    words: np.ndarray
    """uint32 ``[R, ceil(vocab / 32)]``, bit i % 32 of word i // 32: token i is allowed."""
    broken: dict[int, str]
    """Rows whose constraint has failed, and why: fit for clients."""


class SamplingState(NamedTuple):
    """The masks and histories for choosing tokens; a row for each entry that samples. The row of a
    sequence that has ended allows everything."""

    masks: Masks | None
    """None where all rows may choose any token."""
    histories: Sequence[TokenHistory | None]
    """None where a row has no penalties."""


PendingState = Future[SamplingState]
"""A state that is being made while the device computes."""


# --- outcomes -------------------------------------------------------------------------------------


class Token(NamedTuple):
    """The entry's next token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Vector(NamedTuple):
    """The vector of a prompt: float32 ``[hidden_size]`` of length 1."""

    values: np.ndarray


class RowError(NamedTuple):
    """Why there is no token: a fixed sentence, fit for clients."""

    message: str


NOT_FINITE = RowError("the model's output was not finite")


class Scores(NamedTuple):
    """Log-probabilities of prompt tokens, and the token that was sampled after them."""

    logprobs: tuple[TokenLogprobs, ...]
    then: "Token | RowError | None" = None


Outcome = Token | Vector | Scores | RowError


class InFlightStep(Protocol):
    """A step that was begun and has not been read."""

    def submit(self, state: PendingState | None) -> None:
        """Hand the device the rest of the step; may wait for room in its queue. Called once, when
        the step before has been read. state: where the plan needs one. Raises as
        ``StepRunner.begin`` does."""

    def read(self) -> Sequence[Outcome]:
        """Wait for the step; return one outcome for each entry that has one, in order. Raises as
        ``StepRunner.begin`` does."""

    def cancel(self) -> None:
        """Cancel it, because the step before it has failed: it runs no further and is never
        read."""


class StepRunner(Protocol):
    """Runs plans: on the model, or in a simulation."""

    completed_epoch: int
    """The newest epoch that the device has finished."""

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        """Build the step, but for tokens whose choice needs a state. overlapped: the one before it
        has not been read. Then so much of this one is submitted at once that the device has work
        while that one is read.

        Raises EngineFailedError where the device is lost. After any other error nothing of the step
        runs, and the one before it can still be read.
        """

    def release_cache(self) -> None:
        """Release memory that is kept for the next steps."""
