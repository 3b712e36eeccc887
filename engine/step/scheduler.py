"""Chooses the tokens that the next step computes. The choice depends only on token counts.

There are no separate prefill and decode phases. A plan has tokens that are not yet computed,
within a token budget: single tokens first, then chunks of prompts.
"""

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import replace

from engine.figures import EngineStats
from engine.step.constraints import accept, allowed_drafts
from engine.step.drafts import Drafter
from engine.step.pipeline import CompletedStep
from engine.step.plan import (
    NO_STEP,
    NOT_FINITE,
    Attached,
    CacheDecision,
    Closed,
    Forked,
    Opened,
    Outcome,
    PlanEntry,
    StepPlan,
)
from engine.step.sequence import (
    NO_MEMORY,
    SamplingRow,
    Sequence,
    SequenceStatus,
    apply_outcome,
    end,
    plan_entry,
    until_end,
)
from engine.step.token_budget import TokenBudget
from engine.types import EngineLimits, FinishReason, PrefixReport, Request, TokenEvent
from kvcache.block_hashes import BlockHashes
from kvcache.manager import KVCacheManager
from kvcache.sequences import Progress

# Prefixes of this many waiting prompts are read from disk although there is no room for them yet.
READ_AHEAD = 8


def resting_sequences(running: SequenceOf[Sequence], max_step_mask_s: float) -> set[int]:
    """Return ids of sequences that sit out a step, so that its masks take at most max_step_mask_s.

    A mask marks the tokens that may come next. Only sequences whose mask takes more than an equal
    share of the time may sit out. Those that rested longest go first; at least one of them runs.
    """
    masked = [sequence for sequence in running if sequence.mask_s]
    left_s = max_step_mask_s
    if sum(sequence.mask_s for sequence in masked) <= left_s:
        return set()
    share_s = left_s / len(masked)
    costly = [sequence for sequence in masked if sequence.mask_s > share_s]
    left_s -= sum(sequence.mask_s for sequence in masked if sequence.mask_s <= share_s)
    resting: set[int] = set()
    for number, sequence in enumerate(sorted(costly, key=lambda each: -each.steps_rested)):
        if number and sequence.mask_s > left_s:
            sequence.steps_rested += 1
            resting.add(sequence.seq_id)
        else:
            sequence.steps_rested = 0
            left_s -= sequence.mask_s
    return resting


class Sharing:
    """Opens and closes sequences in the cache, and shares prefixes between sequences. Records each
    decision of the cache for the next plan."""

    def __init__(self, kv: KVCacheManager, by_id: Mapping[int, Sequence]) -> None:
        self.kv = kv
        self._by_id = by_id
        self._decisions: list[CacheDecision] = []

    def take_decisions(self) -> tuple[CacheDecision, ...]:
        decisions = tuple(self._decisions)
        self._decisions.clear()
        return decisions

    def attach_cached(self, sequences: Iterable[Sequence], *, in_parts: bool) -> None:
        """Give sequences the blocks of K and V that other sequences have computed for the same
        tokens. With ``in_parts``, give each computed block at once, which frees a reserved block
        for a waiting sequence. Otherwise wait until all blocks to share are computed."""
        for sequence in sequences:
            if sequence.num_scheduled > sequence.num_computed:
                continue
            if sequence.num_uncomputed > 1 and (in_parts or not self.waits_for_owner(sequence)):
                self._attach_cached(sequence)

    def _attach_cached(self, sequence: Sequence) -> None:
        parent, before = self._parent_of(sequence), sequence.num_computed
        if parent is not None and sequence.num_generated == 0:
            forked = self.kv.fork(parent.seq_id, sequence.seq_id)
            if forked > before:
                self._decisions.append(Forked(parent.seq_id, sequence.seq_id, forked))
                before = forked
        attached = self.kv.attach_cached(sequence.seq_id)
        if attached > before:
            self._decisions.append(Attached(sequence.seq_id, attached))

    def waits_for_disk(self, sequence: Sequence) -> bool:
        """Return True while a waiting sequence's prefix is read. The first call begins to read."""
        hashes, boundaries = self._hash(sequence), sequence.request.boundaries
        return self.kv.waits_for_disk(sequence.seq_id, hashes, boundaries)

    def _hash(self, sequence: Sequence) -> BlockHashes:
        if sequence.block_hashes is None:
            sequence.block_hashes = self.kv.block_hashes(sequence.request.salt)
        sequence.block_hashes.extend(sequence.token_ids, 0)
        sequence.block_hashes.max_cached_tokens = sequence.num_reusable
        return sequence.block_hashes

    def open(self, sequence: Sequence) -> bool:
        """Reserve memory for a sequence's tokens and one more. Return False if memory is short."""
        # No K and V are computed for an answer's last token.
        final = max(sequence.max_tokens - 1, sequence.num_prompt)
        num_tokens = min(sequence.num_tokens + 1, final)
        request, reusable = sequence.request, sequence.num_reusable
        progress = self.kv.open(
            sequence.seq_id,
            self._hash(sequence),
            num_tokens,
            final_tokens=final,
            boundaries=request.boundaries,
        )
        if progress is None:
            return False
        sequence.progress = progress
        tokens = tuple(sequence.token_ids)
        self._decisions.append(
            Opened(sequence.seq_id, request, tokens, reusable, num_tokens, final)
        )
        return True

    def close(self, sequence: Sequence, *, keep_prefix: bool, preempted: bool = False) -> None:
        """Free a sequence's memory. With ``keep_prefix``, later prompts can share its blocks."""
        self.kv.close(sequence.seq_id, keep_prefix=keep_prefix)
        self._decisions.append(Closed(sequence.seq_id, keep_prefix, preempted))

    def waits_for_parent(self, child: Sequence) -> bool:
        """Return True if the first answer to the prompt of ``child`` still computes the prompt."""
        parent = self._parent_of(child)
        return parent is not None and parent.num_computed < child.num_prompt

    def _parent_of(self, child: Sequence) -> Sequence | None:
        """Return the sequence that generates the first answer to the prompt of ``child``; None if
        no such sequence runs."""
        first, shares = child.request.request_id, child.num_reusable is None
        parent = self._by_id.get(first) if shares and child.seq_id != first else None
        running = parent is not None and parent.status is SequenceStatus.RUNNING
        return parent if running else None

    def waits_for_owner(self, sequence: Sequence) -> bool:
        """Return True if an earlier sequence computes tokens that this sequence can share. To wait
        costs no time, because the earlier sequence gets the token budget first."""
        owner = self.kv.pending_owner(sequence.seq_id)
        return owner is not None and self._by_id[owner].order < sequence.order


class Scheduler:
    """Schedules sequences first come, first served within a priority.

    The oldest sequence always progresses. When blocks of memory run out, the last sequence in order
    is preempted: the sequence loses its memory, waits, and later recomputes its tokens. Tokens that
    were emitted are never sampled again.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        limits: EngineLimits,
        budget: TokenBudget,
        max_num_batched_tokens: int,
        max_step_mask_s: float = math.inf,
        drafter: Drafter | None = None,
        max_draft_rows: int | None = None,
    ) -> None:
        """``max_step_mask_s`` limits the processor time for making all masks of a step.
        ``max_draft_rows`` limits the rows of a step with drafts (by default to those of any)."""
        self.kv = kv
        self.limits = limits
        self.budget = budget
        self.counters = EngineStats()
        self.drafter = drafter
        self.holds_back = False
        """True while memory is short. Then no sequence is admitted beside a running sequence."""
        self._max_batched_tokens = max_num_batched_tokens
        self._max_draft_rows = max_draft_rows or max_num_batched_tokens
        self.max_step_mask_s = max_step_mask_s
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self.sharing = Sharing(kv, self._by_id)
        self._begun: list[float | None] = []
        self._plans = 0
        self._resting: set[int] = set()
        self._arrivals = 0
        self._is_stuck = False
        """True after an empty plan. Then no sequence is admitted beside a running sequence."""

    # --- adding and ending requests -------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> tuple[SequenceOf[Sequence], SequenceOf[Sequence]]:
        """Return the running and the waiting sequences, in order; do not change the lists."""
        return self._running, self._waiting

    def add(self, request: Request, *, alone: bool = False) -> None:
        """Queue a sequence for each answer. The caller has checked the request against ``limits``.
        With ``alone``, no other sequence runs beside them."""
        prompt, constraint = len(request.prompt_ids), request.constraint
        request = replace(request, constraint=None)
        for seq_id, params in zip(request.answer_ids, request.params, strict=True):
            assert 0 < prompt <= self.limits.max_model_len - min(1, params.max_tokens)
            assert params.max_tokens or request.pooling or params.prompt_logprobs is not None
            assert seq_id not in self._by_id
            max_tokens = min(prompt + params.max_tokens, self.limits.max_model_len)
            is_first = seq_id == request.request_id
            own = constraint if is_first else deepcopy(constraint)
            sequence = Sequence(request, seq_id, self._arrivals, max_tokens, own, alone)
            self._arrivals += 1
            self._by_id[seq_id] = sequence
            insort(self._waiting, sequence, key=lambda s: s.order)

    def abort(self, seq_id: int) -> list[TokenEvent]:
        """End a sequence; return its last event, or no event if the sequence has ended already."""
        sequence = self._by_id.get(seq_id)
        return [] if sequence is None else [self._finish(sequence, FinishReason.ABORTED)]

    def fail(self, plan: StepPlan, message: str) -> list[TokenEvent]:
        left = self.sequences_of(plan.entries)
        return [self._finish(sequence, FinishReason.ERROR, message) for sequence in left]

    def cancel(self, plan: StepPlan) -> None:
        """Cancel a step after the previous step has failed. Its tokens are planned again later."""
        for sequence in self.sequences_of(plan.entries):
            self.kv.cancel_steps(sequence.seq_id)
            sequence.num_output_placeholders = 0

    def sequences_of(self, entries: Iterable[PlanEntry]) -> list[Sequence]:
        return [self._by_id[entry.seq_id] for entry in entries if entry.seq_id in self._by_id]

    def sampling_rows(self, plan: StepPlan) -> list[SamplingRow]:
        """Return an item for each token that the plan samples. All earlier steps must have been
        committed."""
        rows: list[SamplingRow] = []
        for entry in plan.entries:
            if entry.sampling is None:
                continue
            sequence = self._by_id.get(entry.seq_id)
            drafts, known = entry.draft_tokens, entry.start + entry.count - entry.drafts
            assert sequence is None or sequence.num_tokens == known, "a token is not known yet"
            rows += [SamplingRow(sequence, drafts[:n]) for n in range(entry.num_sampled)]
        return rows

    # --- planning and committing a step ---------------------------------------------------------

    def schedule(self, *, overlapped: bool = False) -> StepPlan:
        """Return the next step's plan, which may be empty. If memory runs out, preempt sequences.

        ``overlapped`` is True while a step is in flight. In this case no sequence is preempted; if
        memory runs out, the plan is empty.
        """
        self._begun = []
        self._resting = resting_sequences(self._running, self.max_step_mask_s)
        entries, starving = self._plan_decoding(overlapped)
        if starving and overlapped and not entries:
            return NO_STEP
        if len(entries) < len(self._running):
            self.sharing.attach_cached(self._running, in_parts=bool(self._waiting))
        if not starving and not (self._is_stuck and self._running):
            self._admit()
        if len(entries) < len(self._running):
            self._plan_chunks(entries)
            entries.sort(key=lambda entry: entry.is_chunk)
        self._is_stuck = not entries and not overlapped
        return self._planned(entries)

    def _planned(self, entries: list[PlanEntry]) -> StepPlan:
        num_sampling = 0
        for entry in entries:
            sequence, stop = self._by_id[entry.seq_id], entry.start + entry.count
            sequence.progress.scheduled = stop
            if entry.sampling is not None:
                sequence.sampled_row = num_sampling
                num_sampling += entry.num_sampled
                # No K and V are computed for an answer's last token. Drafts wait for no token.
                awaited = stop + 1 < sequence.max_tokens and not entry.drafts
                sequence.num_output_placeholders += awaited
        if not entries:
            # Keep the cache's decisions for the next plan with entries.
            return StepPlan(0, (), refused=self._break_deadlock() if self._is_stuck else ())
        self._plans += 1
        decisions = self.sharing.take_decisions()
        return StepPlan(self._plans, tuple(entries), decisions, tuple(self._begun))

    def observe(self, step: CompletedStep) -> None:
        """Learn from the time that a step took."""
        plan, prefill = step.plan, step.plan.prefill_tokens
        self.budget.observe(prefill, step.seconds, decoding=plan.decodes, pairs=plan.pairs)
        if self.drafter is not None and not prefill:
            rows = sum(entry.count for entry in plan.entries)
            self.drafter.observe(rows, step.seconds, step.interval_s)

    def commit(self, plan: StepPlan, outcomes: SequenceOf[Outcome]) -> list[TokenEvent]:
        """Apply a step's outcomes, one per entry that samples or scores; return the events."""
        events: list[TokenEvent] = []
        rest = iter(outcomes)
        for entry in plan.entries:
            outcome = next(rest) if entry.has_outcome else None
            sequence = self._by_id.get(entry.seq_id)
            if sequence is None:
                self.counters.wasted_rows += outcome is not None
                continue
            assert sequence.status is SequenceStatus.RUNNING, "preempted in flight"
            results = until_end(sequence, outcome)
            start, stop = entry.start, entry.start + entry.count - entry.drafts
            kept = entry.draft_tokens[: max(0, len(results) - 1)]
            self.kv.commit(sequence.seq_id, [*sequence.token_ids[start:stop], *kept])
            if start < sequence.num_prompt:
                self.counters.prompt_tokens += min(stop, sequence.num_prompt) - start
            if sequence.drafted_by is sequence.text_drafts:
                sequence.accepted_drafts += len(kept)
                sequence.rejected_drafts += entry.drafts - len(kept)
            self.counters.drafted_tokens += entry.drafts
            self.counters.accepted_tokens += len(kept)
            if entry.drafts and self.drafter is not None:
                self.drafter.note(sequence, entry.drafts, len(kept))
            for each in results:
                event = apply_outcome(sequence, accept(sequence, each))
                if event is not None:
                    sequence.num_output_placeholders -= event.finish is None and not entry.drafts
                    events.append(event)
                    if self._note(sequence, event):
                        break
        return events

    def _note(self, sequence: Sequence, event: TokenEvent) -> bool:
        """Count an event. If it is the sequence's last, close the sequence and return True."""
        self.counters.generated_tokens += event.token_id is not None
        if event.finish is None:
            return False
        self.counters.failed_rows += event.message == NOT_FINITE.message
        self._close(sequence, event.finish)
        return True

    # --- the parts of planning a step -----------------------------------------------------------

    def _plan_decoding(self, overlapped: bool) -> tuple[list[PlanEntry], bool]:
        """Return entries of sequences that lack one token, and whether any of them has no entry."""
        entries: list[PlanEntry] = []
        starving, rows = False, 0
        ready = [sequence for sequence in self._running if self._may_decode(sequence)]
        all_drafts: dict[int, tuple[int, ...]] = {}
        if (drafter := self._active_drafter) is not None:
            if self._awaits_tokens(drafter, ready):
                self._resting |= {sequence.seq_id for sequence in ready}
                return [], False
            all_drafts = self._draft(drafter, ready, overlapped=overlapped)
        for sequence in ready:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # it was preempted for one before it
            if rows == self._max_batched_tokens:
                return entries, True
            tokens = sequence.num_tokens + sequence.num_output_placeholders
            drafts = all_drafts.get(sequence.seq_id, ())
            fits = bool(drafts) or self.kv.reserve(sequence.seq_id, tokens)
            if fits or (not overlapped and self._make_room(sequence)):
                entries.append(plan_entry(sequence, tokens, self._plans, drafts))
                rows += entries[-1].count
            elif overlapped and (self.kv.wants_mapping_point or not self.kv.recovering):
                return [], True
            else:
                starving = starving or sequence.status is SequenceStatus.RUNNING
        return entries, starving

    def _may_decode(self, sequence: Sequence) -> bool:
        lacks_one = sequence.num_uncomputed == 1 and sequence.prefix is not None
        return lacks_one and sequence.seq_id not in self._resting

    @property
    def _active_drafter(self) -> Drafter | None:
        """None while a prompt is computed: its chunks would run between a sequence's steps. Also
        None if a step has no room for a draft of each sequence."""
        prefills = any(sequence.num_uncomputed > 1 for sequence in self._running)
        too_many = 2 * len(self._running) > self._max_draft_rows
        return None if prefills or too_many else self.drafter

    def _awaits_tokens(self, drafter: Drafter, ready: SequenceOf[Sequence]) -> bool:
        """Return True if the step in flight has drafts, or samples a token which drafts can follow.
        Then all wait for it: sequences that are computed in turns take twice the time."""
        running = len(self._running)
        has_drafts = any(sequence.num_uncomputed < 0 for sequence in self._running)
        in_flight = [sequence for sequence in ready if sequence.num_output_placeholders]
        return has_drafts or any(drafter.may_follow(each, running) for each in in_flight)

    def _draft(
        self, drafter: Drafter, ready: SequenceOf[Sequence], *, overlapped: bool
    ) -> dict[int, tuple[int, ...]]:
        """Return drafts by sequence. Memory for them is reserved."""
        wanted: list[tuple[Sequence, int]] = []
        share = self._max_draft_rows // max(1, len(ready)) - 1
        for sequence in ready:
            # No K and V are computed for an answer's last token.
            room = min(share, sequence.max_tokens - 1 - sequence.num_tokens)
            if sequence.num_output_placeholders or room <= 0:
                continue
            depth = drafter.depth(sequence, room, len(self._running), idle=not overlapped)
            if depth and self.kv.reserve(sequence.seq_id, sequence.num_tokens + depth, depth):
                wanted.append((sequence, depth))
        drafts = zip(wanted, drafter.propose(wanted), strict=True)
        return {each.seq_id: self._allowed(each, tokens) for (each, _), tokens in drafts}

    def _allowed(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        if not drafts or sequence.constraint is None:
            return drafts
        return allowed_drafts(sequence.constraint, drafts, self.limits.vocab_size)

    def _make_room(self, sequence: Sequence) -> bool:
        """Reserve memory for a sequence's next token. If needed, preempt the youngest sequences,
        unless memory is being freed already. Return False if there is no memory yet."""
        while not self.kv.reserve(sequence.seq_id, sequence.num_tokens):
            if self.kv.recovering or len(self._running) == 1:
                return False
            if self._preempt_youngest() is sequence:
                return False
        return True

    def _break_deadlock(self) -> tuple[TokenEvent, ...]:
        """Preempt the youngest sequence, because memory is too short for any sequence to run. If
        there is only one sequence, end it with an error."""
        if self.kv.recovering:
            return ()
        if len(self._running) > 1:
            self._preempt_youngest()
            return ()
        if self.kv.transfers_may_end:
            return ()
        alone = self._running or self._waiting[:1]
        return tuple(self._finish(each, FinishReason.ERROR, NO_MEMORY) for each in list(alone))

    def _admit(self) -> None:
        """Admit waiting sequences until one does not fit into memory. Skip second and later answers
        to a prompt that is not computed yet, and prompts whose prefix is read. Then let those that
        are next read ahead."""
        max_running = 1 if self.holds_back else self.limits.max_num_seqs
        room = max(0, max_running - len(self._running))
        for sequence in self._waiting[:room]:
            if self._running and (sequence.runs_alone or self._running[0].runs_alone):
                break
            if self.sharing.waits_for_disk(sequence) or self.sharing.waits_for_parent(sequence):
                continue
            if not self.sharing.open(sequence):
                return  # what is read for others would take memory that this one waits for
            self._waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self._running, sequence, key=lambda s: s.order)
            self.sharing.attach_cached([sequence], in_parts=bool(self._waiting))
        for sequence in self._waiting[:READ_AHEAD]:
            self.sharing.waits_for_disk(sequence)

    def _plan_chunks(self, entries: list[PlanEntry]) -> None:
        """Add entries for chunks of prompts, in order, within the token budget."""
        decoding = any(sequence.num_generated for sequence in self._running)
        room: float = self.budget.room(decoding=decoding)
        rows = num_decoding = sum(entry.count for entry in entries)
        done = {entry.seq_id for entry in entries} | self._resting
        for sequence in self._running:
            if room <= 0 or rows >= self._max_batched_tokens:
                return
            has_more = sequence.num_uncomputed > 0 and sequence.seq_id not in done
            if has_more and not self.sharing.waits_for_owner(sequence):
                start = sequence.num_scheduled
                fit = self.budget.chunk(room, start, rows, first=rows == num_decoding)
                fit = min(fit, self._max_batched_tokens - rows)
                count = self._plan_chunk(sequence, fit, entries) if fit > 0 else 0
                room -= count * self.budget.weight(start, count)
                rows += count

    def _plan_chunk(self, sequence: Sequence, room: int, entries: list[PlanEntry]) -> int:
        """Add an entry for at most ``room`` tokens of a prompt; return the number of tokens."""
        count = min(sequence.num_uncomputed, room)
        stop = sequence.num_scheduled + count
        if not self.kv.reserve(sequence.seq_id, stop):
            return 0
        if sequence.prefix is None:
            self._report(sequence)
        self.kv.add_pending_prefix(sequence.seq_id)
        entries.append(plan_entry(sequence, stop, self._plans))
        return count

    def _report(self, sequence: Sequence) -> None:
        left_at, miss = self.kv.explain(sequence.seq_id)
        sequence.prefix = PrefixReport(sequence.num_computed, left_at, miss)
        self._begun.append(sequence.request.submitted_s)
        self.counters.submitted_prompt_tokens += sequence.num_prompt
        self.counters.cached_prompt_tokens += sequence.num_computed
        if miss is not None:
            self.counters.prefix_misses[miss] += 1

    def _preempt_youngest(self) -> Sequence:
        sequence = self._running.pop()
        assert sequence.num_scheduled == sequence.num_computed, "preempted in flight"
        self.sharing.close(sequence, keep_prefix=True, preempted=True)
        sequence.status = SequenceStatus.WAITING
        sequence.progress = Progress()
        sequence.preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, sequence, key=lambda s: s.order)
        return sequence

    # --- the end of a sequence ------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, why: str = "") -> TokenEvent:
        self._close(sequence, reason)
        return end(sequence, reason, why or None)

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.sharing.close(sequence, keep_prefix=reason is not FinishReason.ERROR)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
            self.kv.stop_waiting(sequence.seq_id)
        sequence.status = SequenceStatus.FINISHED
        del self._by_id[sequence.seq_id]
