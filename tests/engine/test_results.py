"""What a result makes of its sequence, and what is said of it."""

from typing import Any

import numpy as np
import pytest

from engine.results import NOT_FINITE, take
from engine.step_plan import PlanEntry, scored_positions
from engine.types import (
    FinishReason,
    PrefixReport,
    Request,
    Sampled,
    SamplingParams,
    Sequence,
    TokenLogprobs,
)

PROMPT = (5, 6, 7)
REPORT = PrefixReport(0, 0, None)
ONE, OTHER = TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())
READING: dict[str, Any] = {"prompt_logprobs": 0}


def entry(max_tokens: int = 2, **params: Any) -> PlanEntry:
    request = Request(1, PROMPT, SamplingParams(max_tokens, **params))
    sequence = Sequence(request, 0, len(PROMPT) + max_tokens)
    sequence.prefix = REPORT
    return PlanEntry(sequence, 0, len(PROMPT), samples=True)


def test_tokens_follow_the_prompt_until_there_are_enough() -> None:
    plan = entry()
    first, last = take(plan, Sampled(8, ONE)), take(plan, Sampled(9))
    assert first is not None
    assert (first.token_id, first.finish, first.logprobs, first.prefix) == (8, None, ONE, REPORT)
    assert last is not None
    assert (last.token_id, last.finish, last.prefix) == (9, FinishReason.LENGTH, REPORT)
    assert first.prompt_logprobs is last.prompt_logprobs is None
    assert plan.sequence.token_ids == [*PROMPT, 8, 9]


def test_what_is_between_the_first_token_and_the_end_has_no_report() -> None:
    plan = entry(3)
    events = [take(plan, Sampled(8)) for _ in range(2)]
    assert [event and event.prefix for event in events] == [REPORT, None]


def test_a_stop_token_ends_an_answer() -> None:
    event = take(entry(stop_token_ids=frozenset({8})), Sampled(8))
    assert event is not None
    assert (event.token_id, event.finish) == (8, FinishReason.STOP)


def test_scores_of_chunks_are_gathered_and_told_with_the_first_token() -> None:
    plan = entry(**READING)
    plan.samples = False
    assert take(plan, Sampled(None, scored=(ONE,))) is None
    plan.samples = True
    first, second = take(plan, Sampled(8, scored=(OTHER,))), take(plan, Sampled(9))
    assert first is not None
    assert first.prompt_logprobs == (None, ONE, OTHER)
    assert second is not None
    assert second.prompt_logprobs is None


def test_without_tokens_scores_come_with_the_end() -> None:
    plan = entry(0, **READING)
    event = take(plan, Sampled(8, scored=(ONE, OTHER)))
    assert event is not None
    assert (event.token_id, event.finish, event.prefix) == (None, FinishReason.LENGTH, REPORT)
    assert event.prompt_logprobs == (None, ONE, OTHER)
    assert plan.sequence.token_ids == [*PROMPT]


def test_a_vector_ends_its_request() -> None:
    vector = np.ones(3, np.float32)
    event = take(entry(0), Sampled(None, embedding=vector))
    assert event is not None
    assert event.embedding is vector
    assert (event.token_id, event.finish) == (None, FinishReason.STOP)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Sampled(None), NOT_FINITE),
        (Sampled(None, message="no rules"), "no rules"),
        (Sampled(8, scored=None), NOT_FINITE),
    ],
)
def test_what_is_not_finite_ends_with_an_error(result: Sampled, message: str) -> None:
    event = take(entry(), result)
    assert event is not None
    assert (event.finish, event.message) == (FinishReason.ERROR, message)


def test_only_what_is_not_known_is_scored_and_never_the_last_token() -> None:
    assert scored_positions(entry().sequence, 3) == range(0)
    sequence = entry(**READING).sequence
    assert scored_positions(sequence, 1) == range(1)
    assert scored_positions(sequence, 3) == range(2)
    sequence.scored = [ONE]
    assert scored_positions(sequence, 3) == range(1, 2)
    sequence.num_computed = 2
    assert not scored_positions(sequence, 3)


def test_others_may_give_what_needs_no_score() -> None:
    assert entry().sequence.num_reusable is None
    sequence = entry(**READING).sequence
    assert sequence.num_reusable == 0
    sequence.scored = [ONE]
    assert sequence.num_reusable == 1
    sequence.scored = [ONE, OTHER]
    assert sequence.num_reusable is None
