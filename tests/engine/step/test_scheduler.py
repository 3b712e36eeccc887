from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from engine.step.plan import NOT_FINITE, Token, Verified
from engine.step.scheduler import Scheduler
from engine.step.sequence import Acceptance
from engine.step.sequence import Sequence as RunningSequence
from engine.step.token_budget import TokenBudget
from engine.types import (
    BlockHashes,
    EngineLimits,
    FinishReason,
    MissReason,
    PrefixSalt,
    PromptBoundaries,
    Request,
    SamplingParams,
    TokenEvent,
)
from kvcache.manager import KVCacheManager
from kvcache.sequences import Progress
from tests.engines import request_of

BLOCK_TOKENS = 4
NO_MEMORY = "the system has no memory for it"


@dataclass
class CountingKV:
    """A cache that only counts blocks."""

    blocks: int
    refuse: bool = False
    recovering: bool = False
    transfers_may_end: bool = False
    wants_mapping_point: bool = False
    held: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    computed: dict[int, list[int]] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    cached: dict[int, list[int]] = field(default_factory=dict)
    """What a sequence finds when it joins."""
    cancelled: list[int] = field(default_factory=list)

    def _free(self) -> int:
        used = sum(max(self.held[s], self.reserved[s]) for s in self.held)
        return self.blocks - used

    def block_hashes(self, salt: PrefixSalt) -> BlockHashes:
        return BlockHashes(b"", salt, BLOCK_TOKENS)

    def open(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        *,
        final_tokens: int,
        boundaries: PromptBoundaries,
    ) -> Progress | None:
        assert block_hashes.num_tokens <= num_tokens <= final_tokens
        needed = -(-num_tokens // BLOCK_TOKENS)
        if needed > self._free():
            return None
        self.held[seq_id], self.reserved[seq_id] = 0, needed
        self.computed[seq_id] = list(self.cached.get(seq_id, []))
        self.progress[seq_id] = Progress()
        return self.progress[seq_id]

    def waits_for_disk(self, seq_id: int, hashes: BlockHashes, boundaries: object) -> bool:
        return False

    def stop_waiting(self, seq_id: int) -> None: ...

    def attach_cached(self, seq_id: int) -> int:
        self.progress[seq_id].restart_at(len(self.computed[seq_id]))
        return len(self.computed[seq_id])

    def fork(self, seq_id: int, child_id: int) -> int:
        return len(self.computed[child_id])

    def add_pending_prefix(self, seq_id: int) -> None:
        assert seq_id in self.held

    def pending_owner(self, seq_id: int) -> int | None:
        return None

    def explain(self, seq_id: int) -> tuple[int, MissReason | None]:
        return 0, MissReason.NEVER_CACHED

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        needed = -(-num_tokens // BLOCK_TOKENS)
        if self.refuse and needed > self.held[seq_id]:
            return False
        beyond = needed - max(self.held[seq_id], self.reserved[seq_id])
        if beyond > self._free():
            return False
        self.held[seq_id] = max(self.held[seq_id], needed)
        return True

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.computed[seq_id] += token_ids
        self.progress[seq_id].computed += len(token_ids)
        assert len(self.computed[seq_id]) <= self.held[seq_id] * BLOCK_TOKENS

    def cancel_steps(self, seq_id: int) -> None:
        self.cancelled.append(seq_id)
        self.progress[seq_id].restart_at(self.progress[seq_id].computed)

    def close(self, seq_id: int, *, keep_prefix: bool) -> None:
        del self.held[seq_id], self.reserved[seq_id], self.computed[seq_id], self.progress[seq_id]


def scheduler(
    *,
    blocks: int = 100,
    seqs: int = 4,
    budget: int = 16,
    batched: int = 32,
    model_len: int = 64,
    max_draft_rows: int | None = None,
) -> tuple[Scheduler, CountingKV]:
    kv = CountingKV(blocks)
    limits = EngineLimits(max_model_len=model_len, max_num_seqs=seqs, vocab_size=1000)
    tokens = TokenBudget(target_s=1.0, minimum=1, maximum=batched, tokens=budget)
    own = cast(KVCacheManager, kv)
    return Scheduler(own, limits, tokens, batched, max_draft_rows=max_draft_rows), kv


def request(
    request_id: int, prompt: int, max_tokens: int = 8, priority: int = 0, stop: int | None = None
) -> Request:
    params = SamplingParams(
        max_tokens, temperature=0.0, stop_token_ids=frozenset(() if stop is None else (stop,))
    )
    return request_of(request_id, tuple(range(prompt)), params, priority=priority)


def run_step(s: Scheduler, token: int = 7) -> tuple[list[tuple[int, int, int]], list[TokenEvent]]:
    plan = s.schedule()
    outcomes = [Token(token) for e in plan.entries if e.sampling is not None]
    events = [*plan.refused, *s.commit(plan, outcomes)]
    return plan.segments, events


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_decoded() -> None:
    s, kv = scheduler(budget=16)
    s.add(request(1, prompt=40))
    assert run_step(s) == ([(1, 0, 16)], [])
    assert run_step(s) == ([(1, 16, 16)], [])
    plan, (event,) = run_step(s)
    assert plan == [(1, 32, 8)]
    assert (event.token_id, event.finish) == (7, None)
    assert run_step(s)[0] == [(1, 40, 1)]
    assert kv.computed[1] == [*range(40), 7]


def test_decoding_goes_first_and_prompts_fill_what_is_left() -> None:
    s, _ = scheduler(budget=10, batched=10)
    s.add(request(1, prompt=2))
    s.add(request(2, prompt=3))
    run_step(s)
    s.add(request(3, prompt=30))
    assert run_step(s)[0] == [(1, 2, 1), (2, 3, 1), (3, 0, 8)]
    assert run_step(s)[0] == [(1, 3, 1), (2, 4, 1), (3, 8, 8)]


def test_a_chunk_is_smaller_behind_a_long_context_and_leaves_the_rest_to_others() -> None:
    s, _ = scheduler(budget=16)
    s.budget.pair_cost = 0.05
    s.add(request(1, prompt=40))
    assert run_step(s)[0] == [(1, 0, 12)]
    s.add(request(2, prompt=40))
    assert run_step(s)[0] == [(2, 0, 1), (1, 12, 8)]
    assert run_step(s)[0] == [(1, 20, 7)]


def test_a_lower_priority_number_goes_first_and_then_who_came_first() -> None:
    s, _ = scheduler(seqs=1)
    for number, priority in ((1, 5), (5, 0), (3, 0), (9, 0)):
        s.add(request(number, 2, max_tokens=1, priority=priority))
    assert [run_step(s)[0][0][0] for _ in range(4)] == [5, 3, 9, 1]


def test_no_more_sequences_run_than_allowed() -> None:
    s, _ = scheduler(seqs=2)
    for number in range(1, 5):
        s.add(request(number, 2))
    run_step(s)
    assert (s.num_running, s.num_waiting) == (2, 2)


def test_fault_03_a_request_that_does_not_fit_yet_waits_and_holds_the_line() -> None:
    s, _ = scheduler(blocks=6)
    s.add(request(1, 8, max_tokens=2))
    s.add(request(2, 15))
    s.add(request(3, 1))
    assert [p[0] for p in run_step(s)[0]] == [1], "the third would fit, but it is not its turn"
    run_step(s)
    assert sorted(p[0] for p in run_step(s)[0]) == [2, 3]


def test_the_answer_ends_where_the_context_does() -> None:
    s, _ = scheduler(model_len=6)
    s.add(request(1, 4, max_tokens=100))
    events = [run_step(s)[1][0] for _ in range(2)]
    assert [e.finish for e in events] == [None, FinishReason.LENGTH]


def test_fault_07_rows_that_are_not_finite_fail_their_own_request_alone() -> None:
    s, kv = scheduler()
    s.add(request(1, 2))
    s.add(request(2, 2))
    plan = s.schedule()
    events = s.commit(plan, [NOT_FINITE, Token(7)])
    assert [(e.request_id, e.finish) for e in events] == [(1, FinishReason.ERROR), (2, None)]
    assert events[0].message == "the model's output was not finite"
    assert list(kv.held) == [2]
    assert s.counters.failed_rows == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_fault_06_an_abort_in_any_phase_frees_everything_and_is_said_once(steps: int) -> None:
    s, kv = scheduler(budget=4)
    s.add(request(1, 10))
    for _ in range(steps):
        run_step(s)
    (event,) = s.abort(1)
    assert (event.token_id, event.finish) == (None, FinishReason.ABORTED)
    assert kv.held == {}
    assert s.abort(1) == []
    assert run_step(s) == ([], [])


def test_fault_08_a_step_that_could_not_be_run_ends_its_requests_and_no_other() -> None:
    s, _ = scheduler(seqs=1)
    s.add(request(1, 2))
    s.add(request(2, 2))
    (event,) = s.fail(s.schedule(), "broken")
    assert (event.request_id, event.finish, event.message) == (1, FinishReason.ERROR, "broken")
    assert run_step(s)[0] == [(2, 0, 2)]


def test_fault_02_when_blocks_run_out_the_youngest_gives_up_its_memory_and_comes_back() -> None:
    s, kv = scheduler(blocks=6, budget=32)
    s.add(request(1, 4, max_tokens=20))
    s.add(request(2, 4, max_tokens=20))
    answers: dict[int, list[int]] = {1: [], 2: []}
    finished = []
    for step in range(200):
        _, events = run_step(s, token=100 + step)
        for event in events:
            assert event.token_id is not None
            answers[event.request_id].append(event.token_id)
            finished += [event.request_id] if event.finish else []
        if len(finished) == 2:
            break
    assert finished == [1, 2]
    assert [len(answers[i]) for i in (1, 2)] == [20, 20]
    assert s.counters.preemptions > 0
    assert kv.held == {}


def test_priority_decides_before_age_who_gives_up_memory() -> None:
    s, kv = scheduler(blocks=5, budget=32)
    s.add(request(1, 4, max_tokens=20, priority=1))
    s.add(request(2, 4, max_tokens=20, priority=0))
    while s.counters.preemptions == 0:
        run_step(s)
    assert list(kv.held) == [2]


def test_fault_02_the_oldest_always_progresses_in_the_smallest_pool() -> None:
    s, _ = scheduler(blocks=3, budget=32, model_len=12)
    for number in range(1, 6):
        s.add(request(number, 4, max_tokens=100))
    order = []
    for _ in range(500):
        order += [e.request_id for e in run_step(s)[1] if e.finish]
    assert order == [1, 2, 3, 4, 5]


def test_a_system_that_maps_no_more_costs_the_youngest_its_place() -> None:
    s, kv = scheduler(budget=4)
    s.add(request(1, 12))
    s.add(request(2, 12))
    run_step(s)
    s.budget.tokens = 32
    run_step(s)
    assert s.num_running == 2
    kv.refuse = True
    for sequence in list(s._running):
        sequence.progress.restart_at(min(sequence.num_computed, 8))
    while s.num_running == 2:
        run_step(s)
    assert s.counters.preemptions == 1
    assert list(kv.held) == [1]


def test_while_memory_is_on_its_way_back_nobody_else_gives_any_up() -> None:
    s, kv = scheduler(blocks=8, budget=32)
    for number in range(1, 4):
        s.add(request(number, 7, max_tokens=20))
    run_step(s)
    run_step(s)
    kv.refuse = True  # all three need a block now
    kv.recovering = True
    for _ in range(5):
        assert s.schedule().entries == ()
    assert (s.counters.preemptions, s.num_running) == (0, 3)
    kv.refuse = kv.recovering = False
    assert run_step(s)[0][0] == (1, 8, 1)


def test_a_sequence_alone_that_the_system_has_no_memory_for_ends_and_lets_the_next_one_in() -> None:
    s, kv = scheduler(budget=32)
    s.add(request(1, 7, max_tokens=20))
    run_step(s)
    run_step(s)
    s.add(request(2, 3, max_tokens=1))
    kv.refuse = True
    events = run_step(s)[1]
    assert [(e.request_id, e.finish) for e in events if e.finish] == [(1, FinishReason.ERROR)]
    assert events[-1].message == NO_MEMORY
    kv.refuse = False
    assert run_step(s)[1][0].finish is FinishReason.LENGTH


def test_requests_that_the_system_maps_nothing_for_end_one_after_the_other() -> None:
    """Whoever gives way does not come in again before the first has tried alone."""
    s, kv = scheduler()
    for number in (1, 2, 3):
        s.add(request(number, 7))
    kv.refuse = True
    ended = [event for _ in range(12) for event in run_step(s)[1]]
    assert [event.request_id for event in ended] == [1, 2, 3]
    assert {event.finish for event in ended} == {FinishReason.ERROR}


def test_what_comes_before_a_running_prompt_in_order_does_not_wait_for_its_end() -> None:
    s, _ = scheduler(budget=4)
    s.add(request(1, 40))
    run_step(s)
    s.add(request(2, 3, priority=-1))
    s.add(request(3, 3))
    assert run_step(s)[0] == [(1, 4, 1), (2, 0, 3)]
    assert (s.num_running, s.num_waiting) == (3, 0), "all that fit are in"


def test_the_prompt_is_never_printed() -> None:
    r = request(1, 5)
    assert repr(r) == "Request(1, 5 prompt tokens)"
    s, _ = scheduler()
    s.add(r)
    assert "0/5 tokens" in repr(s._waiting[0])


def test_a_request_that_no_buffer_can_be_had_for_ends_instead_of_waiting_for_ever() -> None:
    s, kv = scheduler()
    kv.blocks = 0
    s.add(request(1, 5))
    (event,) = run_step(s)[1]
    assert (event.finish, event.message) == (FinishReason.ERROR, NO_MEMORY)
    assert s.num_waiting == 0


def test_no_more_rows_run_than_a_step_may_have() -> None:
    s, kv = scheduler(budget=2, batched=2)
    s.add(request(3, 1, max_tokens=9, priority=1))
    run_step(s)
    s._preempt_youngest()
    kv.cached[3] = [0]  # all but the token that it has generated
    for number in (1, 2):
        s.add(request(number, 1, max_tokens=9))
    for _ in range(3):
        assert [entry[0] for entry in run_step(s)[0]] == [1, 2], "the first in order"
        assert s.num_running == 3


def test_a_prompt_of_one_token_waits_for_budget_like_any_other() -> None:
    s, _ = scheduler(budget=2, batched=2)
    for number in (1, 2, 3):
        s.add(request(number, 1, max_tokens=9))
    for _ in range(3):
        assert [entry[0] for entry in run_step(s)[0]] == [1, 2]


def test_who_rests_for_its_masks_is_planned_neither_as_a_token_nor_as_a_chunk() -> None:
    s, _ = scheduler()
    s.max_step_mask_s = 0.05
    for number in (1, 2, 3):
        s.add(request(number, 2))
    run_step(s)
    running, _ = s.sequences
    for sequence in running[1:]:
        sequence.note_mask(0.04)
    planned = [{entry[0] for entry in run_step(s)[0]} for _ in range(4)]
    assert planned == [{1, 2}, {1, 3}] * 2


# --- waiting for drafts ---------------------------------------------------------------------------


ALL_KEPT = Verified((Token(7),) * 3)


@dataclass
class DraftsOf:
    """Drafts two tokens of some sequences."""

    drafting: set[int]

    def may_follow(self, sequence: RunningSequence, running: int) -> bool:
        return sequence.seq_id in self.drafting

    def depth(self, sequence: RunningSequence, room: int, running: int, *, idle: bool) -> int:
        return min(room, 2) if sequence.seq_id in self.drafting else 0

    def propose(self, wanted: Sequence[tuple[RunningSequence, int]]) -> list[tuple[int, ...]]:
        return [(7,) * depth for _, depth in wanted]

    def note(self, sequence: RunningSequence, drafts: int, kept: int) -> None: ...

    def observe(self, rows: int, seconds: float, interval_s: float) -> None: ...


@pytest.mark.parametrize("drafting", [{1}, {2}, {4}, {1, 3}, {1, 2, 3, 4}])
def test_where_one_sequence_drafts_all_stay_in_one_step(drafting: set[int]) -> None:
    s, _ = scheduler()
    for number in range(1, 5):
        s.add(request(number, 3, max_tokens=30))
    run_step(s)
    s.drafter = DraftsOf(drafting)
    for _ in range(3):
        flying = s.schedule()
        assert [entry.seq_id for entry in flying.entries] == [1, 2, 3, 4]
        assert {entry.seq_id for entry in flying.entries if entry.drafts} == drafting
        assert not s.schedule(overlapped=True).entries
        s.commit(flying, [ALL_KEPT if entry.drafts else Token(7) for entry in flying.entries])


@pytest.mark.parametrize(
    ("sequences", "limit", "drafts"),
    [(1, 8, 2), (2, 8, 2), (3, 8, 1), (4, 8, 1), (5, 8, 0), (8, 8, 0), (1, 2, 1), (2, 2, 0)],
)
def test_a_step_with_drafts_has_limited_rows_that_sequences_share(
    sequences: int, limit: int, drafts: int
) -> None:
    s, _ = scheduler(seqs=8, max_draft_rows=limit)
    for number in range(1, sequences + 1):
        s.add(request(number, 2, max_tokens=30))
    run_step(s)
    s.drafter = DraftsOf(set(range(1, sequences + 1)))
    flying = s.schedule()
    assert [entry.drafts for entry in flying.entries] == [drafts] * sequences
    assert bool(s.schedule(overlapped=True).entries) == (drafts == 0), "none waits for drafts"


def test_nobody_drafts_while_a_prompt_is_computed() -> None:
    s, _ = scheduler(budget=4)
    s.add(request(1, 3, max_tokens=30))
    run_step(s)
    s.add(request(2, 40))
    run_step(s)
    s.drafter = DraftsOf({1})
    flying = s.schedule()
    for _ in range(5):
        ahead = s.schedule(overlapped=True)
        assert [(entry.seq_id, entry.drafts) for entry in ahead.entries] == [(1, 0), (2, 0)]
        s.commit(flying, [Token(7)])
        flying = ahead


@pytest.mark.parametrize("by_head", [False, True])
def test_a_client_is_told_of_drafts_of_texts_alone(by_head: bool) -> None:
    s, _ = scheduler()
    s.add(request(1, 3, max_tokens=30))
    run_step(s)
    (sequence,), _ = s.sequences
    sequence.head_drafts = Acceptance()
    if by_head:
        sequence.drafted_by = sequence.head_drafts
    s.drafter = DraftsOf({1})
    events = s.commit(s.schedule(), [ALL_KEPT])
    assert events[-1].drafts == (None if by_head else (2, 0))
    assert s.counters.accepted_tokens == 2
