"""The state of a request in the engine, and functions that make plan entries and events from it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from engine.step.draft_texts import DraftTexts
from engine.step.plan import (
    Outcome,
    PendingToken,
    PlanEntry,
    RowError,
    Sampling,
    Scores,
    Scoring,
    Token,
    TokenHistory,
    Vector,
    Verified,
)
from engine.types import (
    BlockHashes,
    DraftReport,
    FinishReason,
    PrefixReport,
    Request,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
    TokenLogprobs,
)
from kvcache.sequences import Progress

# The share of drafts that are expected to be kept, before any of a sequence was verified.
FIRST_ACCEPTANCE = 0.8
# The weight of one draft in the average of those that were kept.
DRAFT_WEIGHT = 0.15
# Where drafts rest, the expected share comes back by this part at each chance. A head has a chance
# at each token.
RECOVERY, HEAD_RECOVERY = 0.002, 0.01
NO_MEMORY = "the system has no memory for it"


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class TokenCounts:
    """Counts how often each distinct token ``ids[i]`` was generated (``generated[i]``). A token
    that occurs only in the prompt has the count 0."""

    ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)
    _seen: int = 0

    def update(self, token_ids: list[int], num_prompt: int) -> None:
        """Count the tokens that were appended to ``token_ids`` since the last call."""
        for position in range(self._seen, len(token_ids)):
            token = token_ids[position]
            slot = self._slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.generated.append(0)
            if position >= num_prompt:
                self.generated[slot] += 1
        self._seen = len(token_ids)


@dataclass(slots=True)
class Acceptance:
    """The share of one source's drafts that are expected to be kept, by those verified lately."""

    share: float = FIRST_ACCEPTANCE

    def note(self, drafts: int, kept: int) -> None:
        """Note how many drafts of a step were kept. Those after the first rejected one count not
        at all."""
        for is_kept in (*(1.0,) * kept, *(0.0,) * (kept < drafts)):
            self.share += DRAFT_WEIGHT * (is_kept - self.share)

    def recover(self, part: float = RECOVERY) -> None:
        self.share += part * (FIRST_ACCEPTANCE - self.share)


@dataclass(slots=True, repr=False, eq=False)
class Sequence:
    """The state of an answer. ``token_ids`` are the prompt and the tokens generated so far."""

    request: Request
    """The request, without its constraint."""
    seq_id: int
    """The answer's id, which is also the sequence's id in the cache."""
    arrival: int
    max_tokens: int
    """The largest number of tokens that the prompt and the answer may have together."""
    constraint: TokenConstraint | None = None
    runs_alone: bool = False
    """Whether no other sequence may run at the same time."""
    params: SamplingParams = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    order: tuple[int, int] = field(init=False)
    """The scheduling order: lower priority values first, then earlier arrivals."""
    needs_state: bool = field(init=False)
    """Whether each token needs a SamplingState, for a constraint or penalties."""
    scores_prompt: bool = field(init=False)
    draft_texts: DraftTexts = field(init=False)
    progress: Progress = field(default_factory=Progress)
    """The counts of computed and scheduled tokens, shared with the cache while running."""
    num_output_placeholders: int = 0
    """The number of tokens that steps in flight sample, and that a later step must compute."""
    sampled_row: int = 0
    """The index of the sequence's newest token among all tokens that the same step samples."""
    status: SequenceStatus = SequenceStatus.WAITING
    preemptions: int = 0
    block_hashes: BlockHashes | None = None
    """The hashes that find the sequence's prefix in the cache; kept through preemptions."""
    prefix: PrefixReport | None = None
    """The cached part of the prompt, set when the sequence first computes a token."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """The counts of distinct tokens, updated only for sequences with penalties."""
    mask_s: float = 0.0
    """The expected processor time for the masks of the sequence's rows in a step."""
    steps_rested: int = 0
    """The number of steps in a row that the sequence has sat out because of costly masks."""
    text_drafts: Acceptance = field(default_factory=Acceptance)
    head_drafts: Acceptance | None = None
    """Drafts of the model's head; None until the head is considered for the first time."""
    drafted_by: Acceptance = field(init=False)
    """The source of the newest drafts: one of the two above."""
    accepted_drafts: int = 0
    """The number of kept drafts of texts. Likewise ``rejected_drafts``."""
    rejected_drafts: int = 0
    scored: list[TokenLogprobs] = field(default_factory=list)
    """The scores of prompt tokens so far, from the second token on; kept through preemptions."""

    def __post_init__(self) -> None:
        self.params = self.request.params[self.seq_id - self.request.request_id]
        self.token_ids = list(self.request.prompt_ids)
        self.num_prompt = len(self.token_ids)
        self.order = (self.request.priority, self.arrival)
        self.needs_state = self.constraint is not None or self.params.penalises
        self.scores_prompt = self.params.prompt_logprobs is not None
        self.draft_texts = DraftTexts(self.request.prediction_ids)
        self.drafted_by = self.text_drafts

    def likely_next(self, count: int) -> tuple[int, ...]:
        """Return up to ``count`` tokens that are likely to follow the known ones."""
        return self.draft_texts.likely_next(self.token_ids, self.num_prompt, count)

    @property
    def draft_report(self) -> DraftReport | None:
        counts = self.accepted_drafts, self.rejected_drafts
        return DraftReport(*counts) if any(counts) else None

    @property
    def history(self) -> TokenHistory:
        """Return the distinct tokens and their counts."""
        self.counts.update(self.token_ids, self.num_prompt)
        ids, generated = self.counts.ids, self.counts.generated
        return TokenHistory(np.array(ids, np.int32), np.array(generated, np.float32))

    def note_mask(self, seconds: float) -> None:
        """Record the time for the masks of a step's rows in ``mask_s``, which rises at once but
        falls by at most a half."""
        self.mask_s = max(seconds, self.mask_s / 2)

    @property
    def num_computed(self) -> int:
        """The number of leading tokens with valid K and V."""
        return self.progress.computed

    @property
    def num_scheduled(self) -> int:
        """The number of leading tokens with valid K and V after the steps in flight."""
        return self.progress.scheduled

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """The number of tokens that must be scheduled before the next token can be sampled."""
        return len(self.token_ids) + self.num_output_placeholders - self.progress.scheduled

    @property
    def num_reusable(self) -> int | None:
        """The number of leading tokens whose K and V may be shared; None means all but the last.
        Prompt tokens that are still to be scored must be computed, not shared."""
        is_scored = self.scores_prompt and len(self.scored) + 1 < self.num_prompt
        return len(self.scored) if is_scored else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.value}, "
            f"{self.num_computed}/{self.num_tokens} tokens)"
        )


class SamplingRow(NamedTuple):
    """The sequence, or None if it has ended, and the drafts before a token that a step samples."""

    sequence: Sequence | None
    drafts: tuple[int, ...] = ()

    @property
    def history(self) -> TokenHistory | None:
        """Return the distinct tokens and their counts, or None for an answer without penalties."""
        if self.sequence is None or not self.sequence.params.penalises:
            return None
        known = self.sequence.history
        if not self.drafts:
            return known
        ids, places = np.unique(np.append(known.ids, self.drafts), return_inverse=True)
        counts = np.append(known.generated, np.ones(len(self.drafts)))
        return TokenHistory(ids.astype(np.int32), np.bincount(places, counts).astype(np.float32))


def plan_entry(
    sequence: Sequence, stop: int, newest_plan: int, drafts: tuple[int, ...] = ()
) -> PlanEntry:
    """Return the entry that computes a sequence's unscheduled tokens before position ``stop``, and
    the drafts after these. ``newest_plan`` is the number of the previous plan."""
    start, token_ids = sequence.progress.scheduled, sequence.token_ids
    num_known = len(token_ids)
    tokens: tuple[int, ...] | PendingToken
    if start < num_known:
        tokens = (*token_ids[start:stop], *drafts)
    else:
        tokens = PendingToken(newest_plan, sequence.sampled_row)
    sampling = None
    if stop == num_known + sequence.num_output_placeholders:
        params, num_generated = sequence.params, stop - sequence.num_prompt
        needs_state = sequence.needs_state or params.holds_back_stops(num_generated)
        sampling = Sampling(params, num_generated, needs_state)
    scoring = _scoring(sequence, stop) if sequence.scores_prompt else None
    count = stop - start + len(drafts)
    return PlanEntry(sequence.seq_id, start, count, tokens, sampling, scoring, len(drafts))


def _scoring(sequence: Sequence, stop: int) -> Scoring | None:
    """Return the unscored prompt tokens up to position ``stop``, or None if there are none."""
    num_top = sequence.params.prompt_logprobs
    assert num_top is not None
    first = max(sequence.num_scheduled, len(sequence.scored))
    last = min(stop, sequence.num_prompt - 1)
    if first >= last:
        return None
    return Scoring(first, tuple(sequence.token_ids[first + 1 : last + 1]), num_top)


def until_end(sequence: Sequence, outcome: Outcome | None) -> list[Outcome]:
    """Return an entry's outcomes in order, up to the one that ends the answer."""
    if not isinstance(outcome, Verified):
        return [] if outcome is None else [outcome]
    results: list[Outcome] = []
    for token in outcome.tokens:
        results.append(token)
        if isinstance(token, RowError) or token.token_id in sequence.params.stop_token_ids:
            break
    return results


def apply_outcome(sequence: Sequence, outcome: Outcome) -> TokenEvent | None:
    if isinstance(outcome, Token):
        return _append(sequence, outcome)
    if isinstance(outcome, Scores):
        sequence.scored += outcome.logprobs
        return None if outcome.then is None else apply_outcome(sequence, outcome.then)
    if isinstance(outcome, RowError):
        return end(sequence, FinishReason.ERROR, outcome.message)
    assert isinstance(outcome, Vector)
    return end(sequence, FinishReason.STOP)._replace(embedding=outcome.values)


def _append(sequence: Sequence, outcome: Token) -> TokenEvent:
    tokens, params = sequence.token_ids, sequence.params
    first, scores = len(tokens) == sequence.num_prompt, None
    if first and params.prompt_logprobs is not None:
        scores = (None, *sequence.scored)
        if params.max_tokens == 0:
            return end(sequence, FinishReason.LENGTH)._replace(prompt_logprobs=scores)
    token = outcome.token_id
    tokens.append(token)
    finish = None
    if token in params.stop_token_ids:
        finish = FinishReason.STOP
    elif len(tokens) >= sequence.max_tokens:
        finish = FinishReason.LENGTH
    prefix = sequence.prefix if first or finish is not None else None
    drafts = sequence.draft_report
    return TokenEvent(
        sequence.seq_id, token, finish, outcome.logprobs, None, prefix, scores, drafts
    )


def end(sequence: Sequence, reason: FinishReason, message: str | None = None) -> TokenEvent:
    drafts = sequence.draft_report
    return TokenEvent(sequence.seq_id, None, reason, None, message, sequence.prefix, None, drafts)
