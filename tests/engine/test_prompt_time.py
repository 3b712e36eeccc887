"""How much of the steps' time is the prompts'."""

import pytest

from engine.step_plan import PlanEntry, StepPlan
from engine.token_budget import LEAST_PART, LEAST_ROWS, PromptTime


def a_plan(*counts: int) -> StepPlan:
    """counts: rows of each entry, single ones first."""
    entries = [PlanEntry(i, 0, count, (1,) * count) for i, count in enumerate(counts)]
    return StepPlan(1, tuple(entries))


def test_a_step_of_prompts_alone_is_theirs_whatever_decoding_takes() -> None:
    time = PromptTime()
    time.observe(a_plan(40, 60), 0.5, decoding_s=0.1)
    assert (time.tokens, time.seconds) == (100, 0.5)


def test_beside_answers_the_time_is_that_beyond_what_answers_take_alone() -> None:
    time = PromptTime()
    time.observe(a_plan(1, 1, 1, 64), 0.5, decoding_s=0.1)
    assert time.tokens == 64
    assert time.seconds == pytest.approx(0.4)


def test_where_nobody_knows_what_answers_take_all_of_the_time_counts() -> None:
    time = PromptTime()
    time.observe(a_plan(1, 64), 0.5, decoding_s=0.0)
    assert time.seconds == 0.5


def test_decoding_that_took_long_by_chance_leaves_prompts_a_part_by_their_rows() -> None:
    time = PromptTime()
    time.observe(a_plan(*[1] * 36, 64), 0.5, decoding_s=2.0)
    assert time.seconds == pytest.approx(LEAST_PART * 0.64 * 0.5)


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, LEAST_ROWS - 1), (LEAST_ROWS - 1,), ()])
def test_steps_of_few_prompt_rows_say_nothing(counts: tuple[int, ...]) -> None:
    time = PromptTime()
    time.observe(a_plan(*counts), 0.5, decoding_s=0.1)
    assert time == PromptTime()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_without_a_time_says_nothing(seconds: float) -> None:
    time = PromptTime()
    time.observe(a_plan(64), seconds, decoding_s=0.0)
    assert time == PromptTime()
