"""Steps that overlap: the next one is begun before the one in flight is read."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import mlx.core as mx
import pytest

from engine.messages import Abort, Stop
from engine.step.loop import EngineLoop
from engine.step.pipeline import FAILURE_WINDOW_S
from engine.step.plan import InFlightStep, Outcome, PendingState, StepPlan, StepRunner
from engine.step.runner import ModelRunner, ModelStep
from engine.step.sampler import PendingSamples
from engine.types import EngineFailedError, FinishReason, Request, SamplingParams, TokenEvent
from tests.engines import (
    CONFIG,
    SHAPE,
    VOCAB,
    Answers,
    Scripted,
    built_loop,
    every_third,
    greedy,
    recall_loop,
    request_of,
    run_dry,
    steps,
    use_clock,
)
from tests.kvcache.managers import epochs_of
from tests.recall import RecallModel, recall_many

WAIT_S = 10.0
Fault = Callable[[str, int], None]


def no_fault(what: str, number: int) -> None:
    """Of a device that works."""


@dataclass
class WatchedStep:
    """A step whose calls are written down."""

    step: InFlightStep
    number: int
    runner: "WatchedRunner"

    def submit(self, state: PendingState | None) -> None:
        self.runner.note("submit", self.number)
        self.step.submit(state)

    def read(self) -> Sequence[Outcome]:
        self.runner.note("read", self.number)
        return self.step.read()

    def cancel(self) -> None:
        self.runner.note("cancel", self.number)
        self.step.cancel()


@dataclass
class WatchedRunner:
    """Stands before an engine's runner. fault: raises where something is to go wrong."""

    runner: StepRunner
    fault: Fault = no_fault
    calls: list[tuple[str, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    overlapped: list[bool] = field(default_factory=list)

    @property
    def completed_epoch(self) -> int:
        return self.runner.completed_epoch

    @completed_epoch.setter
    def completed_epoch(self, epoch: int) -> None:
        self.runner.completed_epoch = epoch

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        self.plans.append(plan)
        self.overlapped.append(overlapped)
        step = self.runner.begin(plan, overlapped=overlapped)
        self.note("begin", len(self.plans))
        return WatchedStep(step, len(self.plans), self)

    def note(self, what: str, number: int) -> None:
        self.calls.append((what, number))
        self.fault(what, number)

    def release_cache(self) -> None:
        self.runner.release_cache()


def watched(loop: EngineLoop, fault: Fault = no_fault) -> WatchedRunner:
    runner = WatchedRunner(loop._runner, fault)
    loop._runner = loop._pipeline._runner = runner
    return runner


def fails(what: str, number: int, error: type[Exception] = RuntimeError) -> Fault:
    def fault(its: str, its_number: int) -> None:
        if (its, its_number) == (what, number):
            raise error("injected fault")

    return fault


def answer(prompt: list[int], count: int) -> list[int]:
    return recall_many(prompt, count, len(SHAPE.layers), VOCAB)


# --- the same answers -------------------------------------------------------------------------


def test_overlapping_steps_say_bit_for_bit_what_steps_one_by_one_say(tiny_model: Path) -> None:
    def run(overlap: bool) -> tuple[list[TokenEvent], list[list[tuple[int, int, int]]], int]:
        events: list[TokenEvent] = []
        config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None, overlap=overlap)
        loop = built_loop(tiny_model, config, events.extend)
        # What a step may compute does not depend on how long it takes.
        loop._scheduler.budget.target_s = 1e9
        runner = watched(loop)
        many = (
            SamplingParams(30, temperature=0.0),
            SamplingParams(25, temperature=0.9, seed=7, top_p=0.8, logprobs=3),
            SamplingParams(20, temperature=1.1, seed=8, top_k=20, min_p=0.01),
            SamplingParams(35, temperature=1.0, seed=9, logit_bias=((5, 3.0), (6, -2.0))),
            SamplingParams(30, temperature=0.0, logprobs=0),
            SamplingParams(25, temperature=0.8, seed=3, presence_penalty=0.7, logprobs=1),
            SamplingParams(20, temperature=0.0, repetition_penalty=1.3, prompt_logprobs=1),
            SamplingParams(15, seed=4, min_tokens=15, stop_token_ids=frozenset(range(50))),
        )
        for number, params in enumerate(many, start=1):
            prompt = tuple(range(number, number + 30 * number))
            ruled = Scripted(every_third(256)) if number in (2, 6) else None
            loop.mailbox.put(request_of(number, prompt, params, constraint=ruled))
        run_dry(loop)
        return events, [plan.segments for plan in runner.plans], sum(runner.overlapped)

    one_by_one, their_rows, none = run(overlap=False)
    overlapping, its_rows, some = run(overlap=True)
    assert (none, some) == (0, len(its_rows) - 1)
    assert its_rows == their_rows
    assert [e._replace(prefix=None) for e in overlapping] == [
        e._replace(prefix=None) for e in one_by_one
    ]
    assert len(one_by_one) == 200


def test_the_next_step_is_begun_before_the_one_in_flight_is_read_and_then_submitted() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    runner = watched(loop)
    loop.mailbox.put(greedy(1, [1, 2, 3], 3))
    heard = []
    for _ in steps(loop):
        heard.append(len(answers.tokens.get(1, [])))
    begun_before_read = [("begin", 2), ("read", 1), ("submit", 2), ("begin", 3), ("read", 2)]
    last = [("submit", 3), ("read", 3)]
    assert runner.calls == [("begin", 1), ("submit", 1), *begun_before_read, *last]
    assert [plan.segments for plan in runner.plans] == [[(1, 0, 3)], [(1, 3, 1)], [(1, 4, 1)]]
    assert heard == [0, 1, 2, 3]
    assert answers.tokens[1] == answer([1, 2, 3], 3)


def test_a_stop_token_wastes_one_row_whose_blocks_wait_for_its_epoch() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True, prefix_cache=False)
    said = answer([4, 5], 40)
    params = SamplingParams(40, temperature=0.0, stop_token_ids=frozenset({said[4]}))
    loop.mailbox.put(request_of(1, (4, 5), params))
    loop.mailbox.put(greedy(2, [8], 30))
    while 1 not in answers.finished:
        loop.run_once()
    issued, completed = epochs_of(loop._kv)
    assert issued == completed + 1, "its row of the next step is in flight"
    assert loop._kv.stats().quarantined_bytes > 0
    run_dry(loop)
    assert answers.finished == {1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert answers.tokens == {1: said[:5], 2: answer([8], 30)}
    assert loop.stats.wasted_rows == 1
    assert loop.stats.generated_tokens == 35


def test_who_is_aborted_in_flight_stays_so_when_the_step_fails() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    watched(loop, fails("read", 2))
    for number in (1, 2):
        loop.mailbox.put(greedy(number, [number], 20))
    loop.run_once()
    loop.run_once()
    loop.mailbox.put(Abort(2))
    loop.run_once()
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.ABORTED}
    assert loop._scheduler.num_running == 0


KINDS = (
    SamplingParams(6, temperature=0.0, frequency_penalty=0.5),
    SamplingParams(6, temperature=0.0, min_tokens=2, stop_token_ids=frozenset({1})),
    SamplingParams(6, temperature=0.0, prompt_logprobs=1),
)


def kind(number: int, prompt: list[int], params: SamplingParams) -> Request:
    """Of these the first one also follows a constraint."""
    constraint = Scripted(every_third(VOCAB)) if params.penalises else None
    return request_of(number, tuple(prompt), params, constraint=constraint)


@pytest.mark.parametrize("params", KINDS)
def test_whoever_needs_the_tokens_before_is_begun_ahead_like_all_others(
    params: SamplingParams,
) -> None:
    def run(overlap: bool) -> tuple[Answers, WatchedRunner]:
        answers = Answers.empty()
        loop = recall_loop(answers, overlap=overlap)
        runner = watched(loop)
        loop.mailbox.put(greedy(1, [1, 2], 30))
        for _ in range(3):
            loop.run_once()
        loop.mailbox.put(kind(2, [7, 8], params))
        run_dry(loop)
        return answers, runner

    answers, runner = run(overlap=True)
    assert runner.overlapped == [False] + [True] * 29
    for number in range(2, 31):
        begun = runner.calls.index(("begin", number))
        after = [("begin", number), ("read", number - 1), ("submit", number)]
        assert runner.calls[begun : begun + 3] == after
    one_by_one, _ = run(overlap=False)
    assert answers == one_by_one
    assert answers.tokens[1] == answer([1, 2], 30)
    assert len(answers.tokens[2]) == 6


@dataclass
class Order:
    """What happens to the steps of an engine, in order, on the engine's thread and on that of the
    masks. Where a mask is made, it waits until its step's graph has been submitted."""

    notes: list[str] = field(default_factory=list)
    submitted: Semaphore = field(default_factory=lambda: Semaphore(0))

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        submit_graph, read, sample = ModelStep.submit_graph, ModelStep.read, ModelRunner.sample
        graphs: list[ModelStep] = []

        def watched_graph(step: ModelStep) -> None:
            submit_graph(step)
            if step not in graphs:
                graphs.append(step)
                self.notes.append("graph")
                self.submitted.release()

        def watched_read(step: ModelStep) -> Sequence[Outcome]:
            self.notes.append("read")
            return read(step)

        def watched_sample(*arguments: Any) -> PendingSamples:
            self.notes.append("sample")
            return sample(*arguments)

        monkeypatch.setattr(ModelStep, "submit_graph", watched_graph)
        monkeypatch.setattr(ModelStep, "read", watched_read)
        monkeypatch.setattr(ModelRunner, "sample", watched_sample)

    def allowed(self, accepted: list[int]) -> set[int] | None:
        self.notes.append("mask" if self.submitted.acquire(timeout=WAIT_S) else "mask without step")
        return every_third(VOCAB)(accepted)


@pytest.mark.parametrize(
    ("whole", "steady"),
    [
        (False, ["read", "graph", "mask", "sample"]),
        (True, ["graph", "read", "mask", "sample"]),
    ],
)
def test_masks_are_made_while_the_device_computes_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch, whole: bool, steady: list[str]
) -> None:
    """whole: whether a device takes all of a step before the one in flight is read."""
    answers, order = Answers.empty(), Order()
    loop = recall_loop(answers, overlap=True)
    loop._runner._takes_whole_steps = whole  # type: ignore[attr-defined]
    order.watch(monkeypatch)
    params = SamplingParams(5, temperature=0.0)
    loop.mailbox.put(request_of(1, (1, 2), params, constraint=Scripted(order.allowed)))
    run_dry(loop)
    assert order.notes == ["graph", "mask", "sample", *steady * 4, "read"]
    assert len(answers.tokens[1]) == 5


def test_a_device_that_takes_whole_steps_is_handed_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, handed, hand_over = recall_loop(Answers.empty(), overlap=True), 0, mx.async_eval

    def watched(*arrays: mx.array) -> None:
        nonlocal handed
        handed += 1
        hand_over(*arrays)  # type: ignore[no-untyped-call]

    loop._runner._takes_whole_steps = True  # type: ignore[attr-defined]
    monkeypatch.setattr(mx, "async_eval", watched)
    loop.mailbox.put(greedy(1, [1, 2], 10))
    run_dry(loop)
    assert handed == loop.last_stats().steps == 10


# --- faults -----------------------------------------------------------------------------------


def test_fault_08_a_step_that_cannot_be_begun_lets_the_one_in_flight_speak_first() -> None:
    answers = Answers.empty()
    loop = recall_loop(
        answers,
        overlap=True,
        model=lambda shape, vocab: RecallModel(shape, vocab, failing_tokens=frozenset({900})),
    )
    loop.mailbox.put(greedy(1, [1, 2], 2))
    loop.mailbox.put(greedy(2, [3], 30))
    loop.run_once()
    loop.mailbox.put(greedy(3, [900], 5))
    loop.run_once()
    assert len(answers.tokens[1]) == 1
    assert answers.tokens[2] == answer([3], 1)
    assert answers.finished == dict.fromkeys((1, 2, 3), FinishReason.ERROR)
    loop.mailbox.put(greedy(4, [5, 6], 5))
    run_dry(loop)
    assert answers.tokens[4] == answer([5, 6], 5)


def test_fault_08_when_a_step_fails_those_that_only_the_next_one_had_live_on() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    runner = watched(loop, fails("read", 2))
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.run_once()
    loop.run_once()
    loop.mailbox.put(greedy(2, list(range(30)), 5))
    loop.run_once()
    assert runner.calls[-3:] == [("begin", 3), ("read", 2), ("cancel", 3)]
    assert answers.finished == {1: FinishReason.ERROR}
    run_dry(loop)
    assert answers.tokens[1] == answer([1, 2], 1)
    assert answers.tokens[2] == answer(list(range(30)), 5)
    assert runner.plans[3].segments == [(2, 0, 30)], "computed again from the first token"
    assert loop._kv.stats().live_bytes == 0


def test_fault_08_no_mask_is_made_for_a_step_that_was_cancelled() -> None:
    asked: list[int] = []

    def allowed(accepted: list[int]) -> set[int] | None:
        asked.append(len(accepted))
        return None

    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    runner = watched(loop, fails("read", 2))
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.run_once()
    loop.run_once()
    params = SamplingParams(5, temperature=0.0)
    loop.mailbox.put(request_of(2, (3, 4), params, constraint=Scripted(allowed)))
    loop.run_once()
    assert runner.calls[-2:] == [("read", 2), ("cancel", 3)]
    assert asked == []
    run_dry(loop)
    assert asked == [0, 1, 2, 3, 4]
    assert answers.tokens[2] == answer([3, 4], 5)


def test_fault_08_a_step_whose_tokens_cannot_be_chosen_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("out of luck")

    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    params = SamplingParams(20, temperature=0.0, frequency_penalty=0.5)
    loop.mailbox.put(request_of(1, (1, 2), params))
    loop.run_once()
    with monkeypatch.context() as patch:
        patch.setattr("engine.step.runner.sample", broken)
        loop.run_once()
    loop.mailbox.put(greedy(2, [5], 4))
    run_dry(loop)
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert len(answers.tokens[1]) == 1
    assert answers.tokens[2] == answer([5], 4)
    assert loop._kv.stats().live_bytes == 0


def test_fault_08_a_step_that_cannot_be_submitted_fails_before_another_is_planned() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    runner = watched(loop, fails("submit", 2))
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.run_once()
    loop.run_once()
    assert answers.finished == {}
    loop.run_once()
    assert answers.finished == {1: FinishReason.ERROR}
    assert len(runner.plans) == 2
    assert answers.tokens[1] == answer([1, 2], 1)


def test_fault_08_a_step_that_failed_to_be_begun_behind_one_that_fails_ends_the_engine() -> None:
    loop = recall_loop(Answers.empty(), overlap=True)
    watched(
        loop, lambda what, number: fails("begin", 2)(what, number) or fails("read", 1)(what, number)
    )
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.run_once()
    with pytest.raises(EngineFailedError, match="two steps failed"):
        loop.run_once()


def test_fault_08_a_failed_step_behind_one_that_fails_later_is_not_run_again() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    now = [0.0]
    use_clock(loop, lambda: now[0])

    def fault(what: str, number: int) -> None:
        if (what, number) in (("begin", 2), ("read", 1)):
            now[0] += FAILURE_WINDOW_S + 1
            raise RuntimeError("injected fault")

    runner = watched(loop, fault)
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.run_once()
    loop.mailbox.put(greedy(2, [3], 2))
    loop.run_once()
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.ERROR}
    assert runner.calls[-2:] == [("begin", 2), ("read", 1)]


@pytest.mark.parametrize(("what", "number"), [("begin", 2), ("submit", 2), ("read", 1)])
def test_fault_12_an_assertion_is_never_survived_wherever_it_is_raised(
    what: str, number: int
) -> None:
    loop = recall_loop(Answers.empty(), overlap=True)
    watched(loop, fails(what, number, AssertionError))
    loop.mailbox.put(greedy(1, [1, 2, 3], 5))
    loop.run_once()
    with pytest.raises(AssertionError):
        loop.run_once()


def test_rows_that_are_not_finite_end_their_request_and_its_row_in_flight() -> None:
    answers = Answers.empty()
    said = answer([1, 2], 3)
    loop = recall_loop(
        answers,
        overlap=True,
        model=lambda shape, vocab: RecallModel(
            shape, vocab, non_finite_tokens=frozenset({said[1]})
        ),
    )
    loop.mailbox.put(greedy(1, [1, 2], 20))
    loop.mailbox.put(greedy(2, [5], 20))
    run_dry(loop)
    assert answers.finished == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert answers.tokens == {1: said[:2], 2: answer([5], 20)}
    assert (loop.stats.failed_rows, loop.stats.wasted_rows) == (1, 1)


# --- time and the end -------------------------------------------------------------------------


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own() -> None:
    now = [1e9]
    loop = recall_loop(Answers.empty(), overlap=True)
    use_clock(loop, lambda: now[0])

    def fault(what: str, number: int) -> None:
        now[0] += {"begin": 2.0, "read": 5.0, "submit": 1.0}[what]

    watched(loop, fault)
    loop.mailbox.put(greedy(1, [1, 2], 2))
    loop.run_once()
    loop.run_once()
    # Begun (2 s) and submitted (1 s); the next one begun meanwhile (2 s), read (5 s).
    assert loop.last_stats().step_seconds == 10.0
    assert loop.busy_since == 1e9 + 11.0, "that is when the device was last known to get on"
    loop.run_once()
    assert loop.last_stats().step_seconds == 1.0 + 5.0
    assert loop.busy_since is None
    assert not loop.run_once()


def test_an_engine_that_is_told_to_end_reads_what_is_in_flight() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=True)
    loop.mailbox.put(greedy(1, [1, 2], 1))
    loop.mailbox.put(Stop())
    loop.run()
    assert answers.tokens == {1: answer([1, 2], 1)}
    assert loop._pipeline.depth == 0


def test_an_engine_that_fails_waits_for_what_is_in_flight_before_its_memory_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = recall_loop(Answers.empty(), overlap=True)
    runner = watched(loop)
    loop.mailbox.put(greedy(1, [1, 2], 10))
    loop.run_once()
    with caplog.at_level(logging.CRITICAL):
        loop.close()
    assert runner.calls[-1] == ("read", 1)
