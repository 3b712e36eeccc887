"""The scheduler over the real cache: who shares, who waits, who comes back."""

from collections.abc import Callable, Sequence
from typing import Any

from engine.step.plan import StepPlan, Token
from engine.step.scheduler import Scheduler
from engine.step.token_budget import TokenBudget
from engine.types import (
    EngineLimits,
    FinishReason,
    MissReason,
    SamplingParams,
    TokenEvent,
)
from kvcache.manager import KVCacheManager
from tests.engines import request_of
from tests.kvcache.managers import (
    TOKENS,
    blocks_needed,
    complete_steps,
    full_group,
    small_manager,
)
from tests.kvcache.strict_memory import StrictMemory

COMMON = list(range(1000, 1064))  # four blocks


class Engine:
    """A scheduler and a cache, stepped by hand; the next token is always 7."""

    def __init__(
        self, *, heaps: int = 8, sequences: int = 8, budget: int = 64, **changes: Any
    ) -> None:
        self.kv: KVCacheManager
        self.backend: StrictMemory
        self.kv, self.backend = small_manager(heaps=heaps, sequences=sequences, **changes)
        limits = EngineLimits(self.kv.max_tokens, sequences, 2000)
        tokens = TokenBudget(target_s=1.0, minimum=1, maximum=512, tokens=budget)
        self.scheduler = Scheduler(self.kv, limits, tokens, 512)
        self.events: list[TokenEvent] = []

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int = 4,
        answers: int = 1,
        **of: Any,
    ) -> None:
        params = [SamplingParams(max_tokens, temperature=0.0)] * answers
        self.scheduler.add(request_of(request_id, prompt, *params, **of))

    def step(self) -> dict[int, tuple[int, int]]:
        """Returns what was computed: (start, count) by request."""
        return self.step_with(lambda: None)

    def step_with(self, check: Callable[[], None]) -> dict[int, tuple[int, int]]:
        """check: called when the step has been planned."""
        plan = self.scheduler.schedule()
        check()
        if plan.entries:
            self.kv.views(plan.segments)
        samples = [Token(7) for entry in plan.entries if entry.sampling is not None]
        self.events += self.scheduler.commit(plan, samples)
        complete_steps(self.kv)
        self.kv.check_invariants()
        return shape(plan)

    def check_that_the_next_does_not_fit(self) -> None:
        for sequence in self.scheduler._waiting[:1]:
            assert full_group(self.kv).allocator.available_blocks < blocks_needed(self.kv, sequence)

    def run(self) -> None:
        while self.scheduler.num_running + self.scheduler.num_waiting:
            self.step()

    def first(self, request_id: int) -> TokenEvent:
        return next(event for event in self.events if event.request_id == request_id)


def shape(plan: StepPlan) -> dict[int, tuple[int, int]]:
    return {e.seq_id: (e.start, e.count) for e in plan.entries}


def test_a_request_computes_only_what_the_cache_does_not_have() -> None:
    engine = Engine()
    engine.add(1, [*COMMON, 1])
    engine.run()
    engine.add(2, [*COMMON, 2, 3])
    assert engine.step() == {2: (64, 2)}
    report = engine.first(2).prefix
    assert report is not None
    assert (report.cached_tokens, report.left_at, report.miss) == (64, 64, None)
    assert engine.scheduler.counters.cached_prompt_tokens == 64
    assert engine.backend.copied_bytes == 0


def test_the_first_request_says_why_it_shared_nothing() -> None:
    engine = Engine()
    engine.add(1, [*COMMON, 1])
    engine.run()
    engine.add(2, [*COMMON[:20], *range(40)])
    engine.run()
    first, second = (engine.first(number).prefix for number in (1, 2))
    assert first is not None
    assert second is not None
    assert (first.cached_tokens, first.left_at, first.miss) == (0, 0, MissReason.NEVER_CACHED)
    assert (second.cached_tokens, second.left_at) == (16, 20)
    assert engine.scheduler.counters.prefix_misses == {MissReason.NEVER_CACHED: 2}


def test_simultaneous_arrivals_compute_their_common_prefix_once() -> None:
    engine = Engine(budget=40)
    for number in range(1, 7):
        engine.add(number, [*COMMON, number, number])
    computed = 0
    while len(engine.events) < 6:
        computed += sum(count for start, count in engine.step().values() if start < 66)
    assert computed == 64 + 6 * 2
    assert engine.scheduler.counters.cached_prompt_tokens == 5 * 64


def test_whoever_waits_for_a_prefix_does_not_hold_others_up() -> None:
    engine = Engine(budget=64)
    engine.add(1, [*COMMON[:48], 1])
    engine.add(2, [*COMMON[:48], 2])
    engine.add(3, [9] * 10)
    assert engine.step() == {1: (0, 49), 3: (0, 10)}
    assert engine.step()[2] == (48, 1)


def test_a_sequence_that_comes_first_does_not_wait_for_a_later_one() -> None:
    engine = Engine(budget=16)
    engine.add(1, [*COMMON, 1])
    engine.step()
    engine.add(2, [*COMMON, 2], priority=-1)
    assert engine.step() == {2: (16, 16)}
    assert engine.step() == {2: (32, 16)}
    assert engine.step() == {2: (48, 16)}


def test_a_prefix_whose_writer_is_aborted_is_computed_by_the_next_in_line() -> None:
    engine = Engine(budget=16)
    for number in (1, 2, 3):
        engine.add(number, [*COMMON, number])
    assert engine.step() == {1: (0, 16)}
    engine.scheduler.abort(1)
    assert engine.step() == {2: (16, 16)}
    engine.run()
    assert engine.scheduler.counters.prompt_tokens == 64 + 2


def test_a_prompt_that_misses_one_token_and_had_to_wait_is_told_what_it_shares() -> None:
    engine = Engine(budget=32)
    engine.add(1, COMMON[:32])
    engine.add(2, [5])
    assert engine.step() == {1: (0, 32)}
    assert engine.step() == {1: (32, 1), 2: (0, 1)}
    report = engine.first(2).prefix
    assert report is not None
    assert report.miss is None


def test_a_preempted_sequence_computes_no_more_than_a_block_and_a_token_again() -> None:
    engine = Engine(heaps=2, sequences=2)
    engine.add(1, [1] * 40, max_tokens=60)
    engine.add(2, [2] * 40, max_tokens=60)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    engine.scheduler.abort(1)
    (preempted,) = engine.scheduler._waiting
    tokens = preempted.num_tokens
    while not (plan := engine.step()):
        pass
    start, count = plan[2]
    assert start + count == tokens
    assert count <= TOKENS + 1
    engine.run()
    answer = [event for event in engine.events if event.request_id == 2]
    assert len(answer) == 60
    assert answer[-1].finish is FinishReason.LENGTH


def test_nothing_that_fits_is_refused() -> None:
    engine = Engine(heaps=3, sequences=8)
    for number in range(1, 9):
        engine.add(number, [number] * 30, max_tokens=20)
    steps_with_waiting = 0
    while engine.scheduler.num_running + engine.scheduler.num_waiting:
        engine.step_with(engine.check_that_the_next_does_not_fit)
        steps_with_waiting += engine.scheduler.num_waiting > 0
    assert steps_with_waiting > 10


def test_what_is_shared_meanwhile_is_free_for_those_who_wait_in_the_same_step() -> None:
    engine = Engine(heaps=2, sequences=8)
    for number in range(1, 5):
        engine.add(number, [*COMMON[:48], number])
    assert engine.step() == {1: (0, 49)}
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)
    engine.step_with(engine.check_that_the_next_does_not_fit)
    assert engine.scheduler.num_running == 4


def test_a_prompt_of_one_token_that_finds_no_budget_is_reported_all_the_same() -> None:
    engine = Engine(budget=40)
    engine.add(1, COMMON[:40], max_tokens=1)
    engine.add(2, [1], max_tokens=1)
    assert engine.step() == {1: (0, 40)}
    engine.run()
    report = engine.first(2).prefix
    assert report is not None
    assert (report.cached_tokens, report.miss) == (0, None)


# --- forks ---------------------------------------------------------------------------------------


def test_forks_wait_for_their_parents_prompt_and_compute_one_token() -> None:
    engine = Engine(budget=32)
    prompt = [*COMMON[:40]]
    engine.add(1, prompt, max_tokens=8, answers=3)
    engine.add(4, [9] * 5)
    assert engine.step() == {1: (0, 32)}
    assert engine.step() == {1: (32, 8), 4: (0, 5)}, "forks hold nobody up"
    assert engine.step() == {1: (40, 1), 2: (39, 1), 3: (39, 1), 4: (5, 1)}
    assert engine.backend.copied_bytes == 2 * 7 * engine.backend.group.bytes_per_token
    engine.run()
    report = engine.first(2).prefix
    assert report is not None
    assert (report.cached_tokens, report.miss) == (39, None)


def test_a_fork_whose_parent_has_ended_finds_the_prompt_in_the_cache() -> None:
    engine = Engine(sequences=1)
    engine.add(1, COMMON[:40], max_tokens=1, answers=2)
    assert engine.step() == {1: (0, 40)}
    assert engine.step() == {2: (32, 8)}
    assert engine.backend.copied_bytes == 0


def test_a_fork_whose_parent_was_aborted_goes_on_alone() -> None:
    engine = Engine(budget=16)
    engine.add(1, COMMON[:40], answers=2)
    assert engine.step() == {1: (0, 16)}
    engine.scheduler.abort(1)
    assert engine.step() == {2: (16, 16)}


def test_a_preempted_fork_comes_back_without_its_parent() -> None:
    engine = Engine(heaps=2, sequences=3)
    engine.add(1, [5] * 20, max_tokens=70, answers=2)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    ends = [event for event in engine.events if event.finish is FinishReason.LENGTH]
    assert len(ends) == 2
