"""The plan of a step and the outcomes of its entries, as plain values without MLX arrays."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from engine.types import Request, SamplingParams, TokenEvent, TokenLogprobs

WORD_BITS = 32


class Opened(NamedTuple):
    """A sequence was given an address range for K and V, and the cached blocks of its prefix."""

    seq_id: int
    request: Request
    """The sequence's request, without its constraint, which is no plain value."""
    token_ids: tuple[int, ...]
    num_reusable: int | None
    """The number of leading tokens whose K and V may be shared; None means all but the last."""
    num_tokens: int
    """The number of tokens for which blocks are reserved."""
    final_tokens: int


class Attached(NamedTuple):
    """A running sequence was given blocks of K and V that other sequences have computed."""

    seq_id: int
    num_computed: int
    """The number of leading tokens that have valid K and V now."""


class Forked(NamedTuple):
    """A later answer to a prompt shares the first answer's full blocks, and copies the rest."""

    parent_id: int
    seq_id: int
    num_computed: int


class Closed(NamedTuple):
    """A sequence has ended or was preempted; its memory is freed."""

    seq_id: int
    keep_prefix: bool
    preempted: bool


CacheDecision = Opened | Attached | Forked | Closed


class PendingToken(NamedTuple):
    """A token that the previous step samples, and that has not been read yet."""

    step: int
    row: int
    """The token's index among all tokens that the previous step samples."""


class Sampling(NamedTuple):
    """The parameters for choosing the token after the last token of a PlanEntry."""

    params: SamplingParams
    num_generated: int
    """The number of tokens in the answer before the chosen token."""
    needs_state: bool = False
    """Whether the choice needs a SamplingState, which is made after all earlier tokens are read."""


class Scoring(NamedTuple):
    """The prompt tokens whose log-probabilities a PlanEntry computes."""

    start: int
    """The position of the token before the first of ``next_tokens``."""
    next_tokens: tuple[int, ...]
    num_top: int
    """The number of alternatives to report with each token."""


class PlanEntry(NamedTuple):
    """The task to run the model over tokens [start, start + count) of a sequence."""

    seq_id: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    tokens: tuple[int, ...] | PendingToken
    sampling: Sampling | None = None
    """Set if the step samples the next token, or pools the prompt's vector."""
    scoring: Scoring | None = None
    drafts: int = 0
    """The number of last tokens that are drafts. The step also samples the token after each."""

    @property
    def has_outcome(self) -> bool:
        return self.sampling is not None or self.scoring is not None

    @property
    def is_chunk(self) -> bool:
        """Return True if the entry computes more tokens than a newest one and its drafts."""
        return self.count > 1 + self.drafts

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.tokens[-self.drafts :] if self.drafts else ()

    @property
    def num_sampled(self) -> int:
        return 0 if self.sampling is None else 1 + self.drafts

    @property
    def samplings(self) -> list[Sampling]:
        """Return the parameters of each sampled token, in order."""
        first = self.sampling
        if first is None:
            return []
        after = first.num_generated + 1
        drafts = range(after, after + self.drafts)
        return [first, *(first._replace(num_generated=number) for number in drafts)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step. Chunks of prompts come last."""

    number: int
    entries: tuple[PlanEntry, ...]
    decisions: tuple[CacheDecision, ...] = ()
    """The cache's decisions since the previous plan, in order."""
    begun: tuple[float | None, ...] = ()
    """The submission time of each request that begins in this step."""
    refused: tuple[TokenEvent, ...] = ()
    """The error events of sequences that do not fit into memory even alone."""

    @property
    def prefill_tokens(self) -> int:
        """The number of tokens in chunks of prompts."""
        return sum(entry.count for entry in self.entries if entry.is_chunk)

    @property
    def pairs(self) -> int:
        """The number of pairs of a token in a chunk of a prompt and a token before it."""
        return sum(e.count * (2 * e.start + e.count - 1) // 2 for e in self.entries if e.is_chunk)

    @property
    def decodes(self) -> bool:
        """Return True if any entry is no chunk of a prompt."""
        return bool(self.entries) and not self.entries[0].is_chunk

    @property
    def needs_state(self) -> bool:
        return any(e.sampling is not None and e.sampling.needs_state for e in self.entries)

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """Return ``(seq_id, start, count)`` of each entry."""
        return [entry[:3] for entry in self.entries]

    @property
    def drafts(self) -> dict[int, int]:
        """Return the numbers of drafts by sequence."""
        return {entry.seq_id: entry.drafts for entry in self.entries if entry.drafts}


NO_STEP = StepPlan(0, ())


class TokenHistory(NamedTuple):
    """The distinct tokens of a sequence, for penalties."""

    ids: np.ndarray
    generated: np.ndarray
    """How often each token was generated, float32; 0 for a token that only the prompt has."""


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Bit masks of the tokens that may come next: one row for each entry that samples."""

    words: np.ndarray
    """uint32 ``[R, ceil(vocab / 32)]``: bit i % 32 of word i // 32 allows token i."""
    broken: dict[int, str]
    """The error messages of rows whose constraint has failed, safe to show to clients."""


class SamplingState(NamedTuple):
    """Masks and histories for choosing tokens, one row for each entry that samples."""

    masks: Masks | None
    histories: Sequence[TokenHistory | None]
    """Each row's history, or None for a row without penalties."""


PendingState = Future[SamplingState]
"""A SamplingState that another thread makes while the device computes."""


class Token(NamedTuple):
    """The sampled next token of an entry."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Vector(NamedTuple):
    """The embedding vector of a prompt: float32 ``[hidden_size]``, scaled to length 1."""

    values: np.ndarray


class RowError(NamedTuple):
    """The reason why an entry got no token: a fixed sentence, safe to show to clients."""

    message: str


NOT_FINITE = RowError("the model's output was not finite")


class Verified(NamedTuple):
    """The tokens sampled after the newest token of an entry with drafts, and after each kept draft.
    A draft is kept if it is the token that is sampled in its place."""

    tokens: tuple[Token | RowError, ...]

    @classmethod
    def of(cls, drafts: Sequence[int], sampled: Sequence[Token | RowError]) -> "Verified":
        """``sampled`` has the token in the place of each draft, and the token after the last."""
        places = zip(drafts, sampled, strict=False)
        kept = takewhile(lambda place: place[1][0] == place[0], places)
        return cls(tuple(sampled[: 1 + sum(1 for _ in kept)]))


class Scores(NamedTuple):
    """Log-probabilities of prompt tokens, and the token sampled after them, if any."""

    logprobs: tuple[TokenLogprobs, ...]
    then: "Token | RowError | None" = None


Outcome = Token | Verified | Vector | Scores | RowError


class InFlightStep(Protocol):
    """A step that was begun and not read. Its methods raise the errors of ``StepRunner.begin``."""

    def submit(self, state: PendingState | None) -> None:
        """Submit the rest of the step to the device's queue; wait while the queue is full. Call
        this once, after the previous step was read. ``state`` is None if the plan needs none."""

    def read(self) -> Sequence[Outcome]:
        """Wait for the step; return one outcome for each entry that samples or scores, in order."""

    def cancel(self) -> None:
        """Cancel the step because the previous step has failed. A cancelled step is not read."""


class StepRunner(Protocol):
    """Runs the plans of steps, either on the model or in a simulation."""

    completed_epoch: int
    """The epoch (number of a step) of the newest step that the device has completed."""

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        """Build a step, and submit the part that can run before the previous step is read.

        ``overlapped`` is True if the previous step has not been read. Raises EngineFailedError if
        the device is lost. After any other error the previous step can still be read.
        """

    def release_cache(self) -> None:
        """Free the memory that the runner keeps for later steps."""
