"""The loop around the steps: failures, idleness, the end."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.figures import MlxMemory
from engine.journal import Journal
from engine.messages import Abort, SetMemoryPressure, Stop
from engine.step.health_check import HEALTH_CHECK_ID
from engine.step.loop import EngineLoop
from engine.step.pipeline import FAILURE_WINDOW_S
from engine.step.plan import NO_STEP, InFlightStep, StepPlan
from engine.step.scheduler import Scheduler
from engine.types import EngineFailedError, FinishReason
from kvcache.backends.choice import KVBackend
from tests.engines import (
    BLOCK_BYTES,
    CONFIG,
    SHAPE,
    VOCAB,
    Answers,
    built_loop,
    greedy,
    recall_loop,
    run_dry,
    steps,
    use_clock,
)
from tests.kvcache.managers import epochs_of, full_group
from tests.recall import RecallModel, recall_many
from tests.simulation.runner import Clock

FAULTY = frozenset({900})


def run_while(loop: EngineLoop, is_short: Callable[[], object]) -> None:
    """Run the loop, for ten seconds at most."""
    deadline = time.monotonic() + 10.0
    while is_short():
        assert time.monotonic() < deadline
        loop.run_once()


def faulty_loop(answers: Answers) -> EngineLoop:
    return recall_loop(answers, model=partial(RecallModel, failing_tokens=FAULTY))


def test_fault_08_a_step_that_fails_ends_its_requests_with_an_error_and_no_others() -> None:
    answers = Answers.empty()
    loop = faulty_loop(answers)
    loop.mailbox.put(greedy(1, [900], 5))
    loop.run_once()
    loop.mailbox.put(greedy(2, [5, 6], 5))
    run_dry(loop)
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert answers.messages[1] == "a step of the engine failed"
    assert answers.tokens[2] == recall_many([5, 6], 5, len(SHAPE.layers), VOCAB)
    assert loop._kv.stats().live_bytes == 0
    run_while(loop, lambda: loop._kv.stats().quarantined_bytes)


def test_fault_08_a_step_that_fails_after_its_appends_writes_nothing_later(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers.empty()
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None)
    loop = built_loop(tiny_model, config, answers)
    with monkeypatch.context() as patch:
        patch.setattr("engine.step.runner.sample", Mock(side_effect=ValueError("out of luck")))
        loop.mailbox.put(greedy(1, list(range(300)), 5))
        while 1 not in answers.finished:
            loop.run_once()
    run_while(loop, lambda: loop._kv.stats().quarantined_bytes)
    # Shorter than the failed one: what that would have written has no memory now, and writing it
    # would end the process.
    loop.mailbox.put(greedy(2, [5, 6], 5))
    run_dry(loop)
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_fault_08_a_second_failure_within_a_minute_ends_the_engine() -> None:
    clock = Clock(1000.0)
    loop = faulty_loop(Answers.empty())
    use_clock(loop, clock)
    loop.mailbox.put(greedy(1, [900], 5))
    loop.run_once()
    clock.now += FAILURE_WINDOW_S - 1
    loop.mailbox.put(greedy(2, [900], 5))
    with pytest.raises(EngineFailedError, match="two steps failed"):
        loop.run_once()


def test_a_failure_now_and_then_does_not_end_the_engine() -> None:
    clock = Clock(1000.0)
    answers = Answers.empty()
    loop = faulty_loop(answers)
    use_clock(loop, clock)
    for number in range(1, 4):
        loop.mailbox.put(greedy(number, [900], 5))
        loop.run_once()
        clock.now += FAILURE_WINDOW_S + 1
    assert set(answers.finished.values()) == {FinishReason.ERROR}


def test_the_last_figures_are_older_ones_where_the_books_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = recall_loop(Answers.empty())
    older = loop.stats
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    loop.run_once()
    assert loop.last_stats().running == 1
    loop.stats = older
    monkeypatch.setattr(loop._kv, "stats", lambda: 1 // 0)
    assert loop.last_stats() is older


def test_a_model_that_cannot_decode_is_found_out_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"the model cannot decode: .* not finite"):
        recall_loop(Answers.empty(), model=partial(RecallModel, non_finite_tokens=frozenset({0})))


def test_a_model_that_raises_is_found_out_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"the model cannot decode: a step .* failed"):
        recall_loop(Answers.empty(), model=partial(RecallModel, failing_tokens=frozenset({0})))


def test_the_first_request_of_our_own_is_not_counted() -> None:
    loop = recall_loop(Answers.empty())
    assert loop.run_once() is False
    assert loop.stats.generated_tokens == loop.stats.prompt_tokens == loop.stats.steps == 0
    assert loop.limits.max_model_len == 400


def test_idleness_gives_memory_back_but_for_one_heap() -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty(), free_slack_bytes=64 * BLOCK_BYTES, idle_release_s=2.0)
    use_clock(loop, clock)
    freed: list[bool] = []
    loop._runner.release_cache = lambda: freed.append(True)  # type: ignore[method-assign]
    for number in range(1, 6):
        loop.mailbox.put(greedy(number, list(range(150)), 3))
    run_dry(loop)
    for _ in range(5):
        clock.now += 0.1
        loop.run_once()
    assert loop._kv.stats().committed_bytes > 4 * BLOCK_BYTES, "slack is kept for a while"
    assert not freed, "so is what MLX keeps for its next arrays"
    clock.now += 3.0
    run_while(
        loop, lambda: loop.stats.kv is None or loop.stats.kv.committed_bytes > 4 * BLOCK_BYTES
    )
    assert freed == [True]


def test_an_engine_whose_requests_wait_for_memory_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty(), idle_release_s=0.0, prefix_keep_s=0.0)
    use_clock(loop, clock)
    loop.mailbox.put(greedy(1, list(range(100)), 1))
    run_dry(loop)
    deadline = time.monotonic() + 10.0
    while not (cached := loop._kv.stats().cached_bytes):
        assert time.monotonic() < deadline, "its buffer was never unmapped"
        loop._kv.step_completed(epochs_of(loop._kv)[1])
    monkeypatch.setattr(Scheduler, "schedule", lambda self, **_: NO_STEP)
    loop.mailbox.put(greedy(2, list(range(100)), 1))
    for _ in range(3):
        clock.now += 1.0
        assert not loop.run_once()
    assert loop._kv.stats().cached_bytes == cached, "who waits may need them"
    loop.mailbox.put(Abort(2))
    for _ in range(3):
        clock.now += 1.0
        loop.run_once()
    assert loop._kv.stats().cached_bytes == 0


def test_prefixes_are_kept_longer_than_free_memory() -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty(), idle_release_s=2.0, prefix_keep_s=60.0)
    use_clock(loop, clock)
    loop.mailbox.put(greedy(1, list(range(150)), 3))
    run_dry(loop)
    loop.run_once()
    for idle_s, cached_blocks in ((10.0, 9), (60.0, 0)):
        clock.now += idle_s
        loop.run_once()
        deadline = time.monotonic() + 10.0
        while loop.stats.kv is None or loop.stats.kv.cached_bytes != cached_blocks * BLOCK_BYTES:
            assert time.monotonic() < deadline
            loop.run_once()


def test_messages_are_taken_in_the_order_in_which_they_came() -> None:
    """An abort that arrives right behind its request must find it, also when the loop slept."""
    answers = Answers.empty()
    loop = recall_loop(answers)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for number in range(1, 30):
        loop.mailbox.put(greedy(number, list(range(300)), 90))
        loop.mailbox.put(Abort(number))
    loop.mailbox.put(Stop())
    thread.join(10.0)
    assert not thread.is_alive()
    assert list(answers.finished.values()) == [FinishReason.ABORTED] * 29


def test_the_time_in_the_queue_ends_with_the_step_that_computes_the_first_token() -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty(), max_num_seqs=1)
    use_clock(loop, clock)
    for number, age in ((1, 3.0), (2, 5.0)):
        loop.mailbox.put(replace(greedy(number, [5, number], 2), submitted_s=clock.now - age))
    loop.mailbox.put(greedy(3, [6, 7], 1))
    for worked in steps(loop):
        clock.now += worked
    seconds, sequences, queue = loop._snapshot().measured
    # The second request waits for both steps of the first, which the loop begins and reads in two
    # turns each. The third has no time of submission.
    assert (sum(queue.counts), queue.total) == (2, 3.0 + 9.0)
    assert sum(seconds.counts) == sum(sequences.counts) == sequences.total == 5


def test_prompt_tokens_count_as_submitted_once_whether_cached_or_not() -> None:
    loop = recall_loop(Answers.empty())
    prompt = list(range(1, 41))
    for number in (1, 2):
        loop.mailbox.put(greedy(number, prompt, 2))
        while loop.run_once() or loop._kv.recovering:
            pass
    stats = loop._snapshot()
    assert stats.submitted_prompt_tokens == 80
    assert stats.cached_prompt_tokens == 32
    assert stats.prompt_tokens == 48


def test_what_mlx_holds_is_asked_for_by_the_thread_that_owns_it() -> None:
    loop = recall_loop(Answers.empty())
    asked = []

    def held() -> MlxMemory:
        asked.append(threading.get_ident())
        return MlxMemory(1, 2, 3)

    loop._mlx_memory = held
    loop.run_once()
    assert loop.stats.mlx == (1, 2, 3)
    assert asked == [threading.get_ident()]


# --- how long a step has been running ---------------------------------------------------------


def test_a_step_is_at_work_from_its_beginning_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty())
    use_clock(loop, clock)
    assert loop.busy_since is None
    begin, seen = loop._runner.begin, []

    def watched(plan: StepPlan, *, overlapped: bool) -> InFlightStep:
        seen.append(loop.busy_since)
        clock.now += 5.0
        return begin(plan, overlapped=overlapped)

    monkeypatch.setattr(loop._runner, "begin", watched)
    loop.mailbox.put(greedy(1, [1, 2, 3], 3))
    busy = [loop.busy_since for _ in steps(loop)]
    assert seen == [1000.0, 1005.0, 1010.0]
    assert busy == [1000.0, None, 1005.0, None, 1010.0, None], "each step is begun, then read"


def test_fault_10_a_step_that_hangs_is_counted_with_all_whom_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = recall_loop(Answers.empty())
    use_clock(loop, Clock(1000.0))  # stands still: the next figures are never due
    begin, seen = loop._runner.begin, []

    def watched(plan: StepPlan, *, overlapped: bool) -> InFlightStep:
        seen.append((loop.stats.running, loop.stats.waiting))
        return begin(plan, overlapped=overlapped)

    monkeypatch.setattr(loop._runner, "begin", watched)
    loop.mailbox.put(greedy(1, [1, 2, 3], 3))
    for _ in range(2):
        loop.run_once()
    for number in range(2, 12):
        loop.mailbox.put(greedy(number, [number, 2, 3], 3))
    loop.run_once()
    assert seen == [(1, 0), (8, 3)], "of 11, and there are 8 places"


def test_fault_10_who_waits_for_memory_that_never_comes_back_counts_as_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty())
    use_clock(loop, clock)
    loop.mailbox.put(greedy(1, [1, 2, 3], 3))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda self, **_: NO_STEP)
        for _ in range(4):
            assert not loop.run_once()
            clock.now += 10.0
            assert loop.busy_since == 1000.0
    run_dry(loop)
    assert loop.busy_since is None


# --- memory pressure --------------------------------------------------------------------------


def test_fault_25_without_memory_prefixes_and_slack_go_back_and_nobody_new_comes_in() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, prefix_keep_s=1000.0, free_slack_bytes=16 * BLOCK_BYTES)
    freed: list[bool] = []
    loop._runner.release_cache = lambda: freed.append(True)  # type: ignore[method-assign]
    loop.mailbox.put(greedy(1, list(range(300)), 1))
    while loop.run_once() or loop._kv.recovering:
        pass
    loop.mailbox.put(greedy(2, list(range(400, 500)), 150))
    loop.run_once()
    assert loop._kv.stats().cached_bytes > 0
    loop.mailbox.put(SetMemoryPressure(1))
    for number in range(3, 6):
        loop.mailbox.put(greedy(number, [number, 2], 60))
    loop.run_once()
    stats = loop._kv.stats()
    assert stats.cached_bytes == 0, "nobody uses them"
    assert freed == [True]
    run_while(loop, lambda: loop._kv.stats().free_slack_bytes > 4 * BLOCK_BYTES)
    most, order = 0, []
    for _ in steps(loop):
        most = max(most, loop._scheduler.num_running)
        order += [number for number in answers.finished if number not in order]
    assert most == 1, "who runs goes on, who waits comes in alone"
    assert order == [1, 2, 3, 4, 5]
    assert set(answers.finished.values()) == {FinishReason.LENGTH}
    for number in range(3, 6):
        want = recall_many([number, 2], 60, len(SHAPE.layers), VOCAB)
        assert answers.tokens[number] == want


def test_fault_25_prefixes_of_those_who_end_meanwhile_are_not_kept_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(1000.0)
    loop = recall_loop(Answers.empty(), prefix_keep_s=1000.0)
    use_clock(loop, clock)
    loop.mailbox.put(SetMemoryPressure(2))
    loop.mailbox.put(greedy(1, list(range(300)), 3))
    for worked in steps(loop):
        clock.now += worked
    run_while(loop, lambda: loop._kv.stats().cached_bytes or loop._kv.recovering)
    assert loop._kv.stats().live_bytes == 0


def test_fault_25_when_it_is_over_all_come_in_together_again() -> None:
    loop = recall_loop(Answers.empty())
    loop.mailbox.put(SetMemoryPressure(1))
    for number in range(1, 5):
        loop.mailbox.put(greedy(number, [number], 50))
    loop.run_once()
    assert (loop._scheduler.num_running, loop._scheduler.num_waiting) == (1, 3)
    loop.mailbox.put(SetMemoryPressure(0))
    for _ in range(2):
        loop.run_once()
    assert (loop._scheduler.num_running, loop._scheduler.num_waiting) == (4, 0)
    assert full_group(loop._kv).allocator.keeps_slack


# --- after deaths of earlier processes --------------------------------------------------------


def journal_of(*deaths: list[tuple[int, ...]]) -> Journal:
    """The journal after deaths at which these prompts ran."""
    for prompts in deaths:
        Journal(KVBackend.PAGED, b"model", b"key").record(EngineFailedError("lost"), prompts)
    return Journal(KVBackend.PAGED, b"model", b"key")


def test_what_ran_at_two_deaths_runs_alone_and_is_refused_where_it_was_alone() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers)
    loop._journal = journal_of([(5, 6), (1,)], [(5, 6)], [(7,), (2,)], [(7,), (3,)])
    for number, prompt in enumerate([[8], [7], [9], [10], [5, 6], [5, 6, 7]]):
        loop.mailbox.put(greedy(number, prompt, 5))
    together = 0
    for _ in steps(loop):
        running = [sequence.token_ids[0] for sequence in loop._scheduler.sequences[0]]
        assert 7 not in running or running == [7]
        together = max(together, len(running))
    assert together == 3, "those behind it"
    ended = dict.fromkeys(range(6), FinishReason.LENGTH)
    assert answers.finished == ended | {4: FinishReason.ERROR}
    assert answers.tokens[1] == recall_many([7], 5, len(SHAPE.layers), VOCAB)
    assert f"refused (digest {loop._journal.digest((5, 6))})" in str(answers.messages[4])


@pytest.mark.parametrize("hangs", [False, True])
def test_a_death_is_remembered_with_the_prompts_that_ran(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = recall_loop(Answers.empty())
    loop._journal = journal_of()
    loop.mailbox.put(greedy(1, [5, 6], 50))
    loop.mailbox.put(greedy(HEALTH_CHECK_ID, [0] * 300, 1))
    loop.run_once()
    assert loop._scheduler.num_running == 2
    if hangs:
        assert loop.record_hang() is None
    else:
        monkeypatch.setattr(loop, "run_once", Mock(side_effect=AssertionError))
        with pytest.raises(AssertionError):
            loop.run()
    journal = journal_of([(5, 6)])
    assert journal.trust((5, 6)) == "refused", "it was alone"
    assert journal.trust((0,)) == "beside others"


def test_no_prompt_of_the_warm_up_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = recall_loop(Answers.empty())
    loop._journal = journal_of([(0,) * 8], [(0,) * 8])
    loop.warm_up([8, 9])
    run_once = loop.run_once

    def fail() -> None:
        run_once()
        raise EngineFailedError("Insufficient Memory")

    monkeypatch.setattr(loop, "run_once", fail)
    with pytest.raises(EngineFailedError):
        loop.warm_up([8, 9])
    assert "out of memory" in journal_of().gentler(CONFIG)[1]
    assert journal_of([(1,) * 9]).trust((1,) * 9) == "beside others"


def test_an_hour_of_steps_without_a_failure_is_a_recovery() -> None:
    loop = recall_loop(Answers.empty())
    times = itertools.count(1e9, 600.0)
    use_clock(loop, lambda: next(times))
    loop._journal = journal_of([(5, 6)], [(5, 6)])
    loop.mailbox.put(greedy(1, [1, 2, 3], 9))
    for _ in steps(loop):
        pass
    assert journal_of().trust((5, 6)) == "beside others"
