"""When a model's health is checked, and what the result means."""

import pytest

from engine.messages import CheckModel
from engine.step.health_check import HEALTH_CHECK_ID, ModelFailedError, ModelHealthCheck
from engine.step.loop import EngineLoop
from engine.step.plan import NOT_FINITE, RowError, Scores, Token, Verified
from engine.types import FinishReason, Request, TokenEvent
from tests.engines import SHAPE, VOCAB, Answers, greedy, recall_loop, request_of, run_dry
from tests.recall import RecallModel, recall_many

POISON = 900
ERROR, LENGTH = FinishReason.ERROR, FinishReason.LENGTH


def poisoned_loop(answers: Answers, *tokens: int) -> EngineLoop:
    """The model's output after these tokens is not finite."""
    return recall_loop(
        answers,
        model=lambda shape, vocab: RecallModel(shape, vocab, non_finite_tokens=frozenset(tokens)),
    )


def test_fault_07_a_poisoned_prompt_alone_does_not_end_the_engine() -> None:
    answers = Answers.empty()
    loop = poisoned_loop(answers, POISON)
    for number in range(1, 21):
        loop.mailbox.put(greedy(number, [POISON], 5))
        run_dry(loop)
    loop.mailbox.put(greedy(21, [5, 6], 5))
    run_dry(loop)
    assert [answers.finished[number] for number in range(1, 22)] == [ERROR] * 20 + [LENGTH]
    assert answers.tokens == {21: recall_many([5, 6], 5, len(SHAPE.layers), VOCAB)}
    assert loop._scheduler.counters.failed_rows == 20


def test_fault_07_many_poisoned_prompts_at_once_do_not_end_the_engine_either() -> None:
    answers = Answers.empty()
    loop = poisoned_loop(answers, POISON)
    for number in range(1, 9):
        loop.mailbox.put(greedy(number, [number, POISON], 5))
    run_dry(loop)
    assert set(answers.finished.values()) == {ERROR}
    assert not loop._health_check.is_running


@pytest.mark.parametrize("pools", [False, True])
def test_fault_07_a_model_that_computes_nothing_any_more_ends_the_engine(pools: bool) -> None:
    answers = Answers.empty()
    model = RecallModel(SHAPE, VOCAB)
    loop = recall_loop(answers, model=lambda *_: model, pools=pools)
    model.non_finite_tokens = frozenset(range(VOCAB))
    request = greedy(1, [5, 6], 0 if pools else 5)
    loop.mailbox.put(request_of(1, request.prompt_ids, *request.params, pooling=pools))
    with pytest.raises(ModelFailedError, match="not finite"):
        run_dry(loop)
    assert answers.finished == {1: ERROR}, "whoever met it first has had an error"


def test_a_step_that_gives_something_finite_asks_the_model_nothing() -> None:
    asked: list[Request] = []
    health_check = ModelHealthCheck(asked.append, pooling=False)
    good = Token(7)
    for finite in (
        good,
        RowError("no rules"),
        Scores((), NOT_FINITE),
        Verified((good, NOT_FINITE)),
    ):
        health_check.observe([NOT_FINITE, finite])
    health_check.observe([])
    assert not asked


def test_the_model_is_asked_once_at_a_time_and_nobody_hears_of_it() -> None:
    asked: list[Request] = []
    health_check = ModelHealthCheck(asked.append, pooling=False)
    for _ in range(3):
        health_check.observe([NOT_FINITE, Verified((NOT_FINITE,))])
    assert [request.request_id for request in asked] == [HEALTH_CHECK_ID]
    good = TokenEvent(HEALTH_CHECK_ID, 7, LENGTH)
    assert health_check.take_own([good, TokenEvent(2, 7)]) == [TokenEvent(2, 7)]
    health_check.observe([NOT_FINITE])
    assert len(asked) == 2


def test_a_check_that_ends_for_another_reason_is_tried_again() -> None:
    asked: list[Request] = []
    health_check = ModelHealthCheck(asked.append, pooling=True)
    health_check.observe([NOT_FINITE])
    failed = TokenEvent(HEALTH_CHECK_ID, None, ERROR, message="a step failed")
    assert health_check.take_own([failed]) == []
    health_check.observe([NOT_FINITE])
    assert len(asked) == 2
    assert all(request.pooling and request.params[0].max_tokens == 0 for request in asked)


def test_a_check_that_is_in_a_failed_step_is_nobodys_end() -> None:
    """The engine's own request has no reader: its end must not be said to anybody."""
    answers = Answers.empty()
    loop = recall_loop(
        answers,
        model=lambda shape, vocab: RecallModel(
            shape,
            vocab,
            non_finite_tokens=frozenset({POISON}),
            failing_tokens=frozenset({POISON + 1}),
        ),
    )
    loop.mailbox.put(greedy(1, [POISON], 5))
    for _ in range(2):
        loop.run_once()
    assert loop._health_check.is_running
    loop.mailbox.put(greedy(2, [POISON + 1], 5))
    run_dry(loop)
    assert answers.finished == {1: ERROR, 2: ERROR}
    assert not loop._health_check.is_running


def test_a_model_that_is_to_be_checked_is_asked_before_those_that_wait() -> None:
    answers = Answers.empty()
    loop = recall_loop(answers, max_num_seqs=1)
    loop.mailbox.put(greedy(1, [5, 6], 3))
    loop.mailbox.put(CheckModel())
    loop.mailbox.put(CheckModel())
    under_way = []
    while not answers.tokens:
        loop.run_once()
        under_way.append(loop._health_check.is_running)
    assert len(under_way) > 1, "the only place was the check's"
    assert not under_way[-1], "the first answer comes after it"
    run_dry(loop)
    assert answers.finished == {1: LENGTH}


def test_a_model_that_is_found_broken_when_it_is_checked_ends_the_engine() -> None:
    answers = Answers.empty()
    model = RecallModel(SHAPE, VOCAB)
    loop = recall_loop(answers, model=lambda *_: model)
    model.non_finite_tokens = frozenset(range(VOCAB))
    loop.mailbox.put(CheckModel())
    with pytest.raises(ModelFailedError, match="not finite"):
        run_dry(loop)
    assert answers.finished == {}
