"""Which prompts are admitted, and when, while others are read from disk or written to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.step.plan import StepPlan
from engine.step.scheduler import Scheduler
from engine.step.token_budget import TokenBudget
from engine.types import EngineLimits, FinishReason, SamplingParams
from kvcache.tier.tier import HUNG_S
from tests.engines import request_of
from tests.kvcache.managers import TOKENS, full_group, join, settle
from tests.kvcache.tier.test_tier import SALT, Cache

ANSWER = SamplingParams(4, temperature=0.0)
UNWRITTEN = replace(SALT, may_be_written=False)
LONG = list(range(18 * TOKENS + 4))


@pytest.fixture
def written(tmp_path: Path) -> Cache:
    """A cache of 20 blocks, and a conversation of 18 on disk."""
    cache = Cache(tmp_path, heaps=5)
    cache.live(LONG)
    cache.after(60)
    return cache


def scheduler_of(cache: Cache) -> Scheduler:
    limits = EngineLimits(max_model_len=320, max_num_seqs=3, vocab_size=1000)
    return Scheduler(cache.kv, limits, TokenBudget(1.0, 16, 512, tokens=512), 512)


def step(cache: Cache, scheduler: Scheduler, seconds: float = 0.0) -> StepPlan:
    plan = scheduler.schedule()
    cache.clock.now += seconds
    cache.memory.complete()
    cache.kv.step_completed(cache.kv._issued_epoch)
    return plan


def before_a_reading(cache: Cache, prompt: list[int]) -> Scheduler:
    """Let a prompt wait that lies on no disk, and a later one whose reading takes time."""
    cache.workers.holds = lambda: True
    scheduler = scheduler_of(cache)
    scheduler.add(request_of(1, prompt, ANSWER, salt=UNWRITTEN))
    scheduler.add(request_of(2, LONG, ANSWER, salt=SALT))
    return scheduler


@pytest.mark.parametrize("tokens", [1, 40, 60, 150, 300])
def test_a_prompt_that_came_first_does_not_wait_for_the_reading_of_later_ones(
    written: Cache, tokens: int
) -> None:
    cache = written.restarted()
    scheduler = before_a_reading(cache, [9] * tokens)
    assert [segment[0] for segment in step(cache, scheduler).segments] == [1]


@pytest.mark.parametrize("blocks", [3, 5, 7, 9, 10])
def test_reading_ahead_evicts_nothing_of_a_prompt_that_came_first(
    written: Cache, blocks: int
) -> None:
    cache = written.restarted()
    prompt = [7] * (blocks * TOKENS + 6)
    cache.live(prompt, salt=UNWRITTEN)
    scheduler = before_a_reading(cache, prompt)
    assert step(cache, scheduler).segments == [(1, blocks * TOKENS, 6)]


@pytest.mark.parametrize("blocks", [9, 10, 12, 15, 18])
def test_nothing_is_read_ahead_while_memory_is_short_for_a_prompt_before(
    written: Cache, blocks: int
) -> None:
    cache = written.restarted()
    cache.workers.holds = lambda: True
    scheduler = scheduler_of(cache)
    scheduler.add(request_of(1, [9] * 12 * TOKENS, ANSWER, salt=UNWRITTEN))
    step(cache, scheduler)
    scheduler.add(request_of(2, [8] * blocks * TOKENS, ANSWER, salt=UNWRITTEN))
    scheduler.add(request_of(3, LONG[: 4 * TOKENS], ANSWER, salt=SALT))
    step(cache, scheduler)
    assert scheduler.num_waiting == 2
    assert cache.stats.waiting_reads == 0


@pytest.mark.parametrize("others", [8, 9, 12, 20, 40])
def test_a_reading_that_hangs_ends_wherever_its_prompt_stands(written: Cache, others: int) -> None:
    cache = written.restarted()
    cache.workers.holds = lambda: True
    scheduler = scheduler_of(cache)
    scheduler.add(request_of(0, LONG, ANSWER, salt=SALT))
    step(cache, scheduler)
    cache.tier._running[0].begun |= {(0, number) for number in range(4)}
    for number in range(1, 1 + others):
        scheduler.add(request_of(number, [number] * 60, ANSWER, salt=UNWRITTEN, priority=-1))
    plans = (step(cache, scheduler, seconds=10.0) for _ in range(10))
    assert any(plan.entries for plan in plans)


@pytest.mark.parametrize("blocks", [5, 7, 10, 14, 18])
def test_a_prompt_is_admitted_between_two_writes(tmp_path: Path, blocks: int) -> None:
    cache = Cache(tmp_path, heaps=5)
    full_group(cache.kv).most_lent = 1
    cache.live(LONG)
    cache.clock.now += 60
    cache.workers.holds = lambda: True
    settle(cache.kv, cache.memory)
    written = refused = 0
    while cache.stats.pending_writes > 1:
        if cache.workers.jobs:
            cache.workers.results.append(cache.workers.jobs.pop(0)())
            written += 1
        cache.clock.now += 1
        settle(cache.kv, cache.memory)
        if join(cache.kv, 7, blocks * TOKENS):
            cache.kv.close(7)
            refused = 0
        else:
            refused += 1
        assert refused < 2, f"it waits for more than the batch of block {written}"
    assert written > 8


def beside_a_write(folder: Path) -> tuple[Cache, Scheduler]:
    """Return a cache whose blocks are all being written, and a prompt that needs some of them."""
    cache = Cache(folder, heaps=5)
    full_group(cache.kv).most_lent = 18
    cache.live(LONG)
    cache.workers.holds = lambda: True
    cache.after(60)
    scheduler = scheduler_of(cache)
    scheduler.add(request_of(1, [9] * 160, ANSWER, salt=SALT))
    return cache, scheduler


@pytest.mark.parametrize("seconds", [6, 15, 30, 45, 59])
def test_a_prompt_alone_waits_for_a_write_that_is_slow(tmp_path: Path, seconds: int) -> None:
    cache, scheduler = beside_a_write(tmp_path)
    for _ in range(seconds):
        plan = step(cache, scheduler, seconds=1.0)
        assert not plan.entries
        assert not plan.refused
        assert cache.kv.transfers_may_end
    cache.workers.holds = lambda: False
    cache.after(0)
    assert step(cache, scheduler).entries


def test_a_prompt_alone_ends_where_a_write_hangs(tmp_path: Path) -> None:
    cache, scheduler = beside_a_write(tmp_path)
    assert not step(cache, scheduler, seconds=HUNG_S).refused
    (event,) = step(cache, scheduler).refused
    assert event.finish is FinishReason.ERROR
