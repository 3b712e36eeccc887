"""Who runs next, and how much of it: policy over counts. No MLX, no clock, no pages.

There is no prefill phase and no decode phase. A sequence has ``num_computed`` and ``num_tokens``;
a step's plan closes the gap under a token budget. Sequences that miss one token go first; chunks of
prompts fill what is left.
"""

from bisect import insort
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from engine.token_budget import TokenBudget
from engine.types import (
    EngineLimits,
    FinishReason,
    Request,
    Sampled,
    Sequence,
    SequenceStatus,
    TokenEvent,
)


class KVDoor(Protocol):
    """What the scheduler asks of the cache."""

    def open(self, seq_id: int, num_tokens: int) -> bool:
        """A buffer, and blocks set aside for so many tokens."""

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Memory for tokens [0, num_tokens)."""

    def commit(self, seq_id: int, token_ids: SequenceOf[int]) -> None:
        """The next positions hold valid K and V."""

    def close(self, seq_id: int) -> None:
        """The sequence leaves."""

    @property
    def recovering(self) -> bool:
        """Whether memory of sequences that left is still on its way back."""


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class SchedulerCounters:
    """What has happened since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    failed_rows: int = 0


@dataclass(slots=True)
class Scheduler:
    """First come, first served within a priority; preemption by recomputation.

    The oldest sequence always progresses: when blocks run out, the one of lowest priority and
    latest arrival gives up its memory, waits, and later recomputes what it had. Who needs the
    memory sits out the steps until it has come back. Tokens that were emitted are never sampled
    again.
    """

    kv: KVDoor
    limits: EngineLimits
    budget: TokenBudget
    max_num_batched_tokens: int
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    _waiting: list[Sequence] = field(default_factory=list)
    _running: list[Sequence] = field(default_factory=list)
    _by_id: dict[int, Sequence] = field(default_factory=dict)
    _arrivals: int = 0

    # --- in and out -----------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences without memory."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with memory."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queues a request. Its prompt fits: the client has checked it against the limits."""
        assert 0 < len(request.prompt_ids) < self.limits.max_model_len
        assert request.request_id not in self._by_id
        sequence = Sequence(request, self._arrivals, list(request.prompt_ids))
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        insort(self._waiting, sequence, key=lambda s: s.order)

    def abort(self, request_id: int) -> list[TokenEvent]:
        """Ends a request; nothing when it has ended already."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return []
        return [self._finish(sequence, None, FinishReason.ABORTED)]

    def fail(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """A step could not be run: all of its requests end with an error."""
        return [
            self._finish(entry.sequence, None, FinishReason.ERROR, message)
            for entry in plan.entries
        ]

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's plan; empty when there is nothing to do."""
        entries = self._plan_decoding()
        starving = len(entries) < sum(s.num_missing == 1 for s in self._running)
        self._plan_chunks(entries, admit=not starving)
        refused = [] if entries else self._break_deadlock()
        return StepPlan(sorted(entries, key=lambda entry: entry.count > 1), refused)

    def commit(self, plan: StepPlan, sampled: SequenceOf[Sampled]) -> list[TokenEvent]:
        """Takes in what the step computed; ``sampled`` follows the entries that sample."""
        events = [
            self._finish(sequence, None, FinishReason.ERROR, "the system has no memory for it")
            for sequence in plan.refused
        ]
        results = iter(sampled)
        for entry in plan.entries:
            sequence = entry.sequence
            end = entry.start + entry.count
            self.kv.commit(sequence.seq_id, sequence.token_ids[entry.start : end])
            sequence.num_computed = end
            self.counters.prompt_tokens += max(0, min(end, sequence.num_prompt) - entry.start)
            if entry.samples:
                events.append(self._take(sequence, next(results)))
        return events

    # --- planning -------------------------------------------------------------------------------

    def _plan_decoding(self) -> list[PlanEntry]:
        """One token for every sequence that misses one, the oldest first."""
        entries: list[PlanEntry] = []
        for sequence in sorted(self._running, key=lambda s: s.order):
            if sequence.num_missing != 1 or sequence.status is not SequenceStatus.RUNNING:
                continue
            if len(entries) < self.max_num_batched_tokens and self._make_room(sequence):
                entries.append(PlanEntry(sequence, sequence.num_computed, 1, samples=True))
        return entries

    def _make_room(self, sequence: Sequence) -> bool:
        """Reserves the sequence's next token. Where that fails, memory must come back first: the
        youngest sequence's, unless some is on its way already."""
        while not self.kv.reserve(sequence.seq_id, sequence.num_tokens):
            if self.kv.recovering or len(self._running) == 1:
                return False
            if self._preempt_youngest() is sequence:
                return False
        return True

    def _break_deadlock(self) -> list[Sequence]:
        """Nothing can run: where that is because the system refuses to map more, one that gives up
        its mappings lets the others go on. A sequence that has nobody beside it is returned."""
        if self.kv.recovering or not self._running:
            return []
        if len(self._running) == 1:
            return list(self._running)
        self._preempt_youngest()
        return []

    def _plan_chunks(self, entries: list[PlanEntry], admit: bool) -> None:
        """Fills what the budget leaves with chunks of prompts, the first in order first, whether
        it runs already or still waits. admit: whether those that wait may come in."""
        room = min(self.budget.tokens, self.max_num_batched_tokens - len(entries))
        prefilling = [s for s in self._running if s.num_missing > 1]
        prefilling.sort(key=lambda s: s.order)
        while room > 0:
            waiting = self._waiting[0] if self._waiting and admit else None
            first = prefilling[0] if prefilling else None
            earlier = waiting and (first is None or waiting.order < first.order)
            if earlier and self._admit():
                room -= self._plan_chunk(self._running[-1], room, entries)
            elif first is not None:
                room -= self._plan_chunk(prefilling.pop(0), room, entries)
            else:
                return

    def _plan_chunk(self, sequence: Sequence, room: int, entries: list[PlanEntry]) -> int:
        """Adds a chunk of at most ``room`` tokens; returns how many."""
        count = min(sequence.num_missing, room)
        end = sequence.num_computed + count
        if not self.kv.reserve(sequence.seq_id, end):
            return 0
        samples = end == sequence.num_tokens
        entries.append(PlanEntry(sequence, sequence.num_computed, count, samples))
        return count

    def _admit(self) -> bool:
        """Lets the first waiting sequence in; False when there is none or it does not fit yet."""
        if not self._waiting or len(self._running) >= self.limits.max_num_seqs:
            return False
        sequence = self._waiting[0]
        if not self.kv.open(sequence.seq_id, sequence.num_tokens):
            return False
        self._waiting.pop(0)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        return True

    def _preempt_youngest(self) -> Sequence:
        """Takes the memory of the last in order; it waits where its arrival puts it."""
        sequence = max(self._running, key=lambda s: s.order)
        self.kv.close(sequence.seq_id)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, sequence, key=lambda s: s.order)
        return sequence

    # --- results --------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, result: Sampled) -> TokenEvent:
        """A sampled token joins its sequence, which may end with it."""
        token = result.token_id
        if token is None:
            self.counters.failed_rows += 1
            return self._finish(
                sequence, None, FinishReason.ERROR, "the model's output was not finite"
            )
        sequence.token_ids.append(token)
        self.counters.generated_tokens += 1
        params = sequence.request.params
        if token in params.stop_token_ids:
            return self._finish(sequence, result, FinishReason.STOP)
        full = sequence.num_tokens >= self.limits.max_model_len
        if full or sequence.num_generated >= params.max_tokens:
            return self._finish(sequence, result, FinishReason.LENGTH)
        return TokenEvent(sequence.seq_id, token, None, result.logprobs)

    def _finish(
        self,
        sequence: Sequence,
        result: Sampled | None,
        reason: FinishReason,
        message: str | None = None,
    ) -> TokenEvent:
        if sequence.status is SequenceStatus.RUNNING:
            self.kv.close(sequence.seq_id)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._by_id[sequence.seq_id]
        token, logprobs = (result.token_id, result.logprobs) if result else (None, None)
        return TokenEvent(sequence.seq_id, token, reason, logprobs, message)
