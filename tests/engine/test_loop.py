"""The loop around the steps: failures, idleness, the end."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import build_engine, plan_engine
from engine.checkpoint import read_checkpoint
from engine.loop import FAILURE_WINDOW_S, Abort, EngineFailedError, EngineLoop, Stop
from engine.machine import MachineMemory
from engine.scheduler import Scheduler
from engine.step_plan import StepPlan
from engine.types import FinishReason, Request, SamplingParams
from tests.engines import BLOCK_BYTES, CONFIG, ON_CPU, SHAPE, VOCAB, Answers, greedy, recall_loop
from tests.recall import RecallModel, recall_many

FAULTY = frozenset({900})


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def faulty_loop(answers: Answers) -> EngineLoop:
    return recall_loop(
        answers, model=lambda shape, vocab: RecallModel(shape, vocab, failing_tokens=FAULTY)
    )


def test_a_step_that_fails_ends_its_requests_with_an_error_and_no_others() -> None:
    answers = Answers.empty()
    loop = faulty_loop(answers)
    loop.mailbox.put(greedy(1, [900], 5))
    loop.step()
    loop.mailbox.put(greedy(2, [5, 6], 5))
    while loop.step():
        pass
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert answers.messages[1] == "a step of the engine failed"
    assert answers.tokens[2] == recall_many([5, 6], 5, SHAPE.num_layers, VOCAB)
    assert loop._kv.stats().live_bytes == 0
    deadline = time.monotonic() + 10.0
    while loop._kv.stats().quarantined_bytes:
        assert time.monotonic() < deadline
        loop.step()


def test_a_step_that_fails_after_its_appends_writes_nothing_later(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers.empty()
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None)
    machine = MachineMemory(2**30, 2**30)
    plan = plan_engine(config, read_checkpoint(tiny_model), machine, ON_CPU["posix"])
    loop = build_engine(plan, config, lambda *_: None, answers)

    def broken(*_: object) -> None:
        raise ValueError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.sample", broken)
        loop.mailbox.put(greedy(1, list(range(300)), 5))
        while 1 not in answers.finished:
            loop.step()
    deadline = time.monotonic() + 10.0
    while loop._kv.stats().quarantined_bytes:
        assert time.monotonic() < deadline
        loop.step()
    # Shorter than the failed one: what that would have written has no memory now, and writing it
    # would end the process.
    loop.mailbox.put(greedy(2, [5, 6], 5))
    while loop.step():
        pass
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_a_second_failure_within_a_minute_ends_the_engine() -> None:
    clock = Clock()
    loop = faulty_loop(Answers.empty())
    loop._clock = clock
    loop.mailbox.put(greedy(1, [900], 5))
    loop.step()
    clock.now += FAILURE_WINDOW_S - 1
    loop.mailbox.put(greedy(2, [900], 5))
    with pytest.raises(EngineFailedError, match="two steps failed"):
        loop.step()


def test_a_failure_now_and_then_does_not_end_the_engine() -> None:
    clock = Clock()
    answers = Answers.empty()
    loop = faulty_loop(answers)
    loop._clock = clock
    for number in range(1, 4):
        loop.mailbox.put(greedy(number, [900], 5))
        loop.step()
        clock.now += FAILURE_WINDOW_S + 1
    assert set(answers.finished.values()) == {FinishReason.ERROR}


def test_an_assertion_is_never_survived() -> None:
    loop = recall_loop(Answers.empty())
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    loop.step()
    loop._kv._open[1].computed = 999
    with pytest.raises(AssertionError):
        loop.step()


def test_a_model_that_cannot_decode_is_found_out_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"the model cannot decode: .* not finite"):
        recall_loop(
            Answers.empty(),
            model=lambda shape, vocab: RecallModel(shape, vocab, non_finite_tokens=frozenset({0})),
        )


def test_the_first_request_of_our_own_is_not_counted() -> None:
    loop = recall_loop(Answers.empty())
    assert loop.step() is False
    assert loop.stats.generated_tokens == loop.stats.prompt_tokens == loop.stats.steps == 0
    assert loop.limits.max_model_len == 400


def test_idleness_gives_memory_back_but_for_one_heap() -> None:
    clock = Clock()
    loop = recall_loop(Answers.empty(), free_slack_bytes=64 * BLOCK_BYTES, idle_release_s=2.0)
    loop._clock = clock
    for number in range(1, 6):
        loop.mailbox.put(greedy(number, list(range(150)), 3))
    while loop.step():
        pass
    for _ in range(5):
        clock.now += 0.1
        loop.step()
    assert loop._kv.stats().committed_bytes > 4 * BLOCK_BYTES, "slack is kept for a while"
    clock.now += 3.0
    deadline = time.monotonic() + 10.0
    while loop.stats.kv is None or loop.stats.kv.committed_bytes > 4 * BLOCK_BYTES:
        assert time.monotonic() < deadline, "memory was kept"
        loop.step()


def test_an_engine_whose_requests_wait_for_memory_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    loop = recall_loop(Answers.empty(), idle_release_s=0.0, prefix_keep_s=0.0)
    loop._clock = clock
    loop.mailbox.put(greedy(1, list(range(100)), 1))
    while loop.step():
        pass
    deadline = time.monotonic() + 10.0
    while not (cached := loop._kv.stats().cached_bytes):
        assert time.monotonic() < deadline, "its buffer was never unmapped"
        loop._kv.step_completed(loop._kv.epochs[1])
    monkeypatch.setattr(Scheduler, "schedule", lambda self: StepPlan([]))
    loop.mailbox.put(greedy(2, list(range(100)), 1))
    for _ in range(3):
        clock.now += 1.0
        assert not loop.step()
    assert loop._kv.stats().cached_bytes == cached, "who waits may need them"
    loop.mailbox.put(Abort(2))
    for _ in range(3):
        clock.now += 1.0
        loop.step()
    assert loop._kv.stats().cached_bytes == 0


def test_prefixes_are_kept_longer_than_free_memory() -> None:
    clock = Clock()
    loop = recall_loop(Answers.empty(), idle_release_s=2.0, prefix_keep_s=60.0)
    loop._clock = clock
    loop.mailbox.put(greedy(1, list(range(150)), 3))
    while loop.step():
        pass
    loop.step()
    for idle_s, cached_blocks in ((10.0, 9), (60.0, 0)):
        clock.now += idle_s
        loop.step()
        deadline = time.monotonic() + 10.0
        while loop.stats.kv is None or loop.stats.kv.cached_bytes != cached_blocks * BLOCK_BYTES:
            assert time.monotonic() < deadline
            loop.step()


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


def test_a_request_with_penalties_survives_preemption() -> None:
    """Its history is counted once, however often its memory is taken."""

    def run(budget_blocks: int) -> tuple[Answers, int]:
        answers = Answers.empty()
        loop = recall_loop(answers, kv_budget_bytes=budget_blocks * BLOCK_BYTES, max_model_len=200)
        for number in range(1, 6):
            params = SamplingParams(
                100, temperature=1.0, seed=number, frequency_penalty=0.7, repetition_penalty=1.2
            )
            loop.mailbox.put(Request(number, tuple(range(number, 40)), params))
        while loop.step() or loop._scheduler.num_waiting + loop._scheduler.num_running:
            pass
        return answers, loop._scheduler.counters.preemptions

    roomy, none = run(64)
    tight, some = run(16)
    assert none == 0
    assert some > 0
    assert roomy.tokens == tight.tokens
