"""A sequence: its state, the entries that it gives a plan, and the events that outcomes make of
it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

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
)
from engine.types import (
    BlockHashes,
    FinishReason,
    PrefixReport,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from kvcache.sequences import Progress

NO_MEMORY = "the system has no memory for it"


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class TokenCounts:
    """Distinct tokens of a sequence in order of first sight, counted as the sequence grows.

    ``ids[i]`` was generated ``generated[i]`` times; 0 means that only the prompt has it.
    """

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


@dataclass(slots=True, repr=False, eq=False)
class Sequence:
    """One running generation.

    ::

        0 ......... num_prompt ............ num_tokens
        prompt      | generated             |
        0 ... num_computed: their K and V are in the cache
        0 ... num_scheduled: or will be, once the steps in flight have run
    """

    request: Request
    arrival: int
    """The order of arrival; counts up."""
    max_tokens: int
    """Limit of prompt and answer together."""
    token_ids: list[int] = field(init=False)
    seq_id: int = field(init=False)
    """The sequence's name in the cache: its request's."""
    num_prompt: int = field(init=False)
    """Tokens of the prompt."""
    order: tuple[int, int] = field(init=False)
    """First come, first served within a priority."""
    needs_state: bool = field(init=False)
    """Whether choosing its tokens needs to know those before: for a constraint, or for penalties.
    Beside these, stop tokens may be held back for some time."""
    scores_prompt: bool = field(init=False)
    """Whether log-probabilities of its prompt are wanted."""
    progress: Progress = field(default_factory=Progress)
    """How far it has come; the cache's own count, while it runs."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight will sample, and that later steps must compute."""
    sampled_row: int = 0
    """In the newest step that samples for it: its place among the rows that sample."""
    status: SequenceStatus = SequenceStatus.WAITING
    preemptions: int = 0
    block_hashes: BlockHashes | None = None
    """The keys of its prefix in the cache; kept through preemptions."""
    prefix: PrefixReport | None = None
    """Made when it first computes a token of its own."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Kept for sequences with penalties."""
    mask_s: float = 0.0
    """Processor time that its next mask is likely to take."""
    steps_rested: int = 0
    """How many steps it has just sat out because of that, one after the other."""
    scored: list[TokenLogprobs] = field(default_factory=list)
    """Scores of the prompt's tokens from the second on, as far as they are computed. Kept through
    preemptions."""

    def __post_init__(self) -> None:
        """Compute once the properties that every step reads."""
        self.token_ids = list(self.request.prompt_ids)
        self.seq_id = self.request.request_id
        self.num_prompt = len(self.token_ids)
        self.order = (self.request.priority, self.arrival)
        params = self.request.params
        self.needs_state = self.request.constraint is not None or params.penalises
        self.scores_prompt = params.prompt_logprobs is not None

    @property
    def history(self) -> TokenHistory | None:
        """Return its distinct tokens; None where it has no penalties."""
        if not self.request.params.penalises:
            return None
        self.counts.update(self.token_ids, self.num_prompt)
        ids, generated = self.counts.ids, self.counts.generated
        return TokenHistory(np.array(ids, np.int32), np.array(generated, np.float32))

    def note_mask(self, seconds: float) -> None:
        """Note how much processor time a mask has taken. A form that was costly may soon be
        again."""
        self.mask_s = max(seconds, self.mask_s / 2)

    @property
    def num_computed(self) -> int:
        """Return how many leading tokens have valid K and V."""
        return self.progress.computed

    @property
    def num_scheduled(self) -> int:
        """Return the same, once the steps in flight have run."""
        return self.progress.scheduled

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the prompt and the answer have so far."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Return how many tokens have been generated."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Return how many tokens still have to be scheduled before the next one can be sampled."""
        return len(self.token_ids) + self.num_output_placeholders - self.progress.scheduled

    @property
    def num_reusable(self) -> int | None:
        """Return how many leading tokens' K and V may come from others. None: all but the last
        token's. Where the prompt is scored, those of the tokens that have been scored already."""
        is_scored = self.scores_prompt and len(self.scored) + 1 < self.num_prompt
        return len(self.scored) if is_scored else None

    def __repr__(self) -> str:
        """Return counts only."""
        return (
            f"Sequence({self.seq_id}, {self.status.value}, "
            f"{self.num_computed}/{self.num_tokens} tokens)"
        )


# --- entries of a plan ----------------------------------------------------------------------------


def plan_entry(sequence: Sequence, stop: int, newest_plan: int) -> PlanEntry:
    """Return the entry that computes a sequence's tokens up to ``stop``, from where the steps in
    flight end. newest_plan: the number of the plan before this one."""
    start, token_ids = sequence.progress.scheduled, sequence.token_ids
    num_known = len(token_ids)
    tokens: tuple[int, ...] | PendingToken
    if start < num_known:
        tokens = tuple(token_ids[start:stop])
    else:
        tokens = PendingToken(newest_plan, sequence.sampled_row)
    sampling = None
    if stop == num_known + sequence.num_output_placeholders:
        params, num_generated = sequence.request.params, stop - sequence.num_prompt
        needs_state = sequence.needs_state or params.holds_back_stops(num_generated)
        sampling = Sampling(params, num_generated, needs_state)
    scoring = _scoring(sequence, stop) if sequence.scores_prompt else None
    return PlanEntry(sequence.seq_id, start, stop - start, tokens, sampling, scoring)


def _scoring(sequence: Sequence, stop: int) -> Scoring | None:
    """Return which tokens of the prompt are still to be scored with the rows before ``stop``."""
    num_top = sequence.request.params.prompt_logprobs
    assert num_top is not None
    first = max(sequence.num_scheduled, len(sequence.scored))
    last = min(stop, sequence.num_prompt - 1)
    if first >= last:
        return None
    return Scoring(first, tuple(sequence.token_ids[first + 1 : last + 1]), num_top)


# --- outcomes of a step ---------------------------------------------------------------------------


def apply_outcome(sequence: Sequence, outcome: Outcome) -> TokenEvent | None:
    """Add an outcome to its sequence. Return the event, with ``finish`` where the sequence ends;
    None while there is nothing to report."""
    if isinstance(outcome, Token):
        return _append(sequence, outcome)
    if isinstance(outcome, Scores):
        sequence.scored += outcome.logprobs
        return None if outcome.then is None else apply_outcome(sequence, outcome.then)
    if isinstance(outcome, RowError):
        return end(sequence, FinishReason.ERROR, outcome.message)
    return end(sequence, FinishReason.STOP)._replace(embedding=outcome.values)


def _append(sequence: Sequence, outcome: Token) -> TokenEvent:
    tokens, params = sequence.token_ids, sequence.request.params
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
    return TokenEvent(sequence.seq_id, token, finish, outcome.logprobs, None, prefix, scores)


def end(sequence: Sequence, reason: FinishReason, message: str | None = None) -> TokenEvent:
    """Return the event of a sequence's end, without a token."""
    return TokenEvent(sequence.seq_id, None, reason, None, message, sequence.prefix)
