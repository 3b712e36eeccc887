"""Who runs next, and how much of it: policy over counts. No MLX, no clock, no pages.

There is no prefill phase and no decode phase. A sequence has ``num_computed`` and ``num_tokens``;
a step's plan closes the gap under a token budget. Who misses one token goes first, then chunks.
"""

from bisect import insort
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.figures import SchedulerCounters
from engine.kv_door import KVDoor
from engine.results import NOT_FINITE, end, take
from engine.step_plan import PlanEntry, StepPlan, scored_positions
from engine.token_budget import TokenBudget
from engine.types import (
    EngineLimits,
    FinishReason,
    PrefixReport,
    Request,
    Sampled,
    Sequence,
    SequenceStatus,
    TokenEvent,
)


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
    _begun: list[Request] = field(default_factory=list)
    _arrivals: int = 0
    _is_stuck: bool = False
    """Whether the last plan was empty: then those that run must go on before others come in."""
    holds_back: bool = False
    """Whether nobody is let in as long as somebody runs."""

    # --- in and out -----------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences without memory."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with memory."""
        return len(self._running)

    @property
    def sequences(self) -> tuple[SequenceOf[Sequence], SequenceOf[Sequence]]:
        """Those that run, and those that wait, in their order; to be read only."""
        return self._running, self._waiting

    def add(self, request: Request) -> None:
        """Queues a request. Its prompt fits: the client has checked it against the limits."""
        prompt, answer = len(request.prompt_ids), request.params.max_tokens
        assert 0 < prompt <= self.limits.max_model_len - min(1, answer)
        assert answer or request.pooling or request.params.prompt_logprobs is not None
        assert request.request_id not in self._by_id
        sequence = Sequence(
            request, self._arrivals, min(prompt + answer, self.limits.max_model_len)
        )
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        insort(self._waiting, sequence, key=lambda s: s.order)

    def abort(self, request_id: int) -> list[TokenEvent]:
        """Ends a request; nothing when it has ended already."""
        sequence = self._by_id.get(request_id)
        return [] if sequence is None else [self._finish(sequence, FinishReason.ABORTED)]

    def fail(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        """A step could not be run: all of its requests end with an error."""
        return [self._finish(entry.sequence, FinishReason.ERROR, message) for entry in plan.entries]

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's plan; empty when there is nothing to do."""
        self._begun = []
        entries, starving = self._plan_decoding()
        if len(entries) < len(self._running):
            self._adopt(self._running)
        if not starving and not (self._is_stuck and self._running):
            self._admit()
        if len(entries) < len(self._running):
            self._plan_chunks(entries)
            entries.sort(key=lambda entry: entry.count > 1)
        self._is_stuck = not entries
        return StepPlan(entries, [] if entries else self._break_deadlock(), self._begun)

    def commit(self, plan: StepPlan, sampled: SequenceOf[Sampled]) -> list[TokenEvent]:
        """Takes in what the step computed; ``sampled`` follows the entries that have results."""
        events = [
            self._finish(sequence, FinishReason.ERROR, "the system has no memory for it")
            for sequence in plan.refused
        ]
        results = iter(sampled)
        for entry in plan.entries:
            sequence, start = entry.sequence, entry.start
            stop = start + entry.count
            self.kv.commit(sequence.seq_id, sequence.token_ids[start:stop])
            sequence.num_computed = stop
            if start < sequence.num_prompt:
                self.counters.prompt_tokens += min(stop, sequence.num_prompt) - start
            if entry.samples or entry.scores:
                event = take(entry, next(results))
                if event is not None:
                    events.append(event)
                    self.counters.generated_tokens += event.token_id is not None
                    if event.finish is not None:
                        self.counters.failed_rows += event.message == NOT_FINITE
                        self._leave(sequence, event.finish)
        return events

    # --- planning -------------------------------------------------------------------------------

    def _plan_decoding(self) -> tuple[list[PlanEntry], bool]:
        """One token for every sequence that misses one, the oldest first; and whether one of them
        goes without."""
        entries: list[PlanEntry] = []
        starving = False
        for sequence in list(self._running):
            computed, tokens = sequence.num_computed, len(sequence.token_ids)
            decoding = tokens - computed == 1 and sequence.prefix is not None
            if not decoding or sequence.status is not SequenceStatus.RUNNING:
                continue
            if len(entries) == self.max_num_batched_tokens:
                return entries, True
            if self.kv.reserve(sequence.seq_id, tokens) or self._make_room(sequence):
                entries.append(PlanEntry(sequence, computed, 1, True))
            else:
                starving = starving or sequence.status is SequenceStatus.RUNNING
        return entries, starving

    def _make_room(self, sequence: Sequence) -> bool:
        """Reserves the next token of a sequence for which there is no memory: it must come back
        first, the youngest sequence's, unless some is on its way already."""
        while not self.kv.reserve(sequence.seq_id, sequence.num_tokens):
            if self.kv.recovering or len(self._running) == 1:
                return False
            if self._preempt_youngest() is sequence:
                return False
        return True

    def _break_deadlock(self) -> list[Sequence]:
        """Nothing can run: where that is because the system refuses to map more, one that gives up
        its mappings lets the others go on. A sequence that has nobody beside it is returned."""
        if self.kv.recovering:
            return []
        if len(self._running) > 1:
            self._preempt_youngest()
            return []
        return list(self._running or self._waiting[:1])

    def _admit(self) -> None:
        """Lets all in that fit, in their order; whoever does not fit holds up those behind. A fork
        whose parent is not ready keeps its place."""
        most = 1 if self.holds_back else self.limits.max_num_seqs
        places = most - len(self._running)
        for sequence in self._waiting[: max(0, places)]:
            if self._parent_is_ahead(sequence):
                continue
            if not self._open(sequence):
                return
            self._waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self._running, sequence, key=lambda s: s.order)
            self._adopt([sequence])

    def _adopt(self, sequences: SequenceOf[Sequence]) -> None:
        """Takes what others have computed of their tokens: all of it at once, but bit by bit while
        the blocks that were set aside for that could let somebody in."""
        for sequence in sequences:
            if sequence.num_missing > 1 and (self._waiting or not self._is_behind(sequence)):
                parent = self._parent_of(sequence)
                if parent is not None and sequence.num_generated == 0:
                    self.kv.fork(parent.seq_id, sequence.seq_id)
                sequence.num_computed = self.kv.adopt(sequence.seq_id)

    def _open(self, sequence: Sequence) -> bool:
        """Memory for what the sequence has, and for one more token if there will be one."""
        if sequence.chain is None:
            sequence.chain = self.kv.chain(sequence.request.salt)
        sequence.chain.extend(sequence.token_ids, 0)
        sequence.chain.most_shared = sequence.num_reusable
        # The last token that is sampled is never computed.
        final = max(sequence.most_tokens - 1, sequence.num_prompt)
        return self.kv.open(
            sequence.seq_id,
            sequence.chain,
            min(sequence.num_tokens + 1, final),
            final_tokens=final,
            system_tokens=sequence.request.system_tokens,
        )

    def _parent_is_ahead(self, child: Sequence) -> bool:
        """Whether a fork's parent is still computing the prompt that both have."""
        parent = self._parent_of(child)
        return parent is not None and parent.num_computed < child.num_prompt

    def _parent_of(self, child: Sequence) -> Sequence | None:
        """The running sequence whose pages a fork can have, if it has a use for them."""
        number = child.request.fork_of if child.num_reusable is None else None
        parent = self._by_id.get(number) if number is not None else None
        running = parent is not None and parent.status is SequenceStatus.RUNNING
        return parent if running else None

    def _plan_chunks(self, entries: list[PlanEntry]) -> None:
        """Fills what the budget leaves with chunks of prompts, the first in order first."""
        room = min(self.budget.tokens, self.max_num_batched_tokens - len(entries))
        planned = {entry.sequence.seq_id for entry in entries}
        for sequence in self._running:
            if room <= 0:
                return
            if sequence.seq_id not in planned and not self._is_behind(sequence):
                room -= self._plan_chunk(sequence, room, entries)

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether one ahead of the sequence is computing its next tokens. That one gets the budget
        first, so that waiting costs no time, and computing them twice would."""
        claimant = self.kv.claimant(sequence.seq_id)
        return claimant is not None and self._by_id[claimant].order < sequence.order

    def _plan_chunk(self, sequence: Sequence, room: int, entries: list[PlanEntry]) -> int:
        """Adds a chunk of at most ``room`` tokens; returns how many."""
        count = min(sequence.num_missing, room)
        stop = sequence.num_computed + count
        if not self.kv.reserve(sequence.seq_id, stop):
            return 0
        if sequence.prefix is None:
            self._report(sequence)
        self.kv.claim(sequence.seq_id)
        samples, scores = stop == sequence.num_tokens, scored_positions(sequence, stop)
        entries.append(PlanEntry(sequence, stop - count, count, samples, scores))
        return count

    def _report(self, sequence: Sequence) -> None:
        """The sequence is about to compute its first token: what it has came from the cache."""
        left_at, miss = self.kv.explain(sequence.seq_id)
        sequence.prefix = PrefixReport(sequence.num_computed, left_at, miss)
        self._begun.append(sequence.request)
        self.counters.submitted_prompt_tokens += sequence.num_prompt
        self.counters.cached_prompt_tokens += sequence.num_computed
        if miss is not None:
            self.counters.prefix_misses[miss] += 1

    def _preempt_youngest(self) -> Sequence:
        """Takes the memory of the last in order; it waits where its arrival puts it."""
        sequence = self._running.pop()
        self.kv.close(sequence.seq_id, keep_prefix=True)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, sequence, key=lambda s: s.order)
        return sequence

    # --- results --------------------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, message: str | None = None
    ) -> TokenEvent:
        self._leave(sequence, reason)
        return end(sequence, reason, message)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.kv.close(sequence.seq_id, keep_prefix=reason is not FinishReason.ERROR)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._by_id[sequence.seq_id]
