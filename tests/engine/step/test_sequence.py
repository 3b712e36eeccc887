"""What an outcome makes of its sequence, and what is said of it."""

from typing import Any

import numpy as np
import pytest

from engine.step.plan import NOT_FINITE, PendingToken, RowError, Scores, Token, Vector
from engine.step.sequence import SamplingRow, Sequence, TokenCounts, apply_outcome, plan_entry
from engine.types import FinishReason, PrefixReport, SamplingParams, TokenLogprobs
from tests.engines import request_of

PROMPT = (5, 6, 7)
REPORT = PrefixReport(0, 0, None)
ONE, OTHER = TokenLogprobs(-1.0, ()), TokenLogprobs(-2.0, ())
READING: dict[str, Any] = {"prompt_logprobs": 0}


def sequence(max_tokens: int = 2, **params: Any) -> Sequence:
    request = request_of(1, PROMPT, SamplingParams(max_tokens, **params))
    made = Sequence(request, 1, 0, len(PROMPT) + max_tokens)
    made.prefix = REPORT
    return made


def test_tokens_follow_the_prompt_until_there_are_enough() -> None:
    one = sequence()
    first, last = apply_outcome(one, Token(8, ONE)), apply_outcome(one, Token(9))
    assert first is not None
    assert (first.token_id, first.finish, first.logprobs, first.prefix) == (8, None, ONE, REPORT)
    assert last is not None
    assert (last.token_id, last.finish, last.prefix) == (9, FinishReason.LENGTH, REPORT)
    assert first.prompt_logprobs is last.prompt_logprobs is None
    assert one.token_ids == [*PROMPT, 8, 9]


def test_what_is_between_the_first_token_and_the_end_has_no_report() -> None:
    one = sequence(3)
    events = [apply_outcome(one, Token(8)) for _ in range(2)]
    assert [event and event.prefix for event in events] == [REPORT, None]


def test_a_stop_token_ends_an_answer() -> None:
    event = apply_outcome(sequence(stop_token_ids=frozenset({8})), Token(8))
    assert event is not None
    assert (event.token_id, event.finish) == (8, FinishReason.STOP)


def test_scores_of_chunks_are_gathered_and_told_with_the_first_token() -> None:
    one = sequence(**READING)
    assert apply_outcome(one, Scores((ONE,))) is None
    first, second = apply_outcome(one, Scores((OTHER,), Token(8))), apply_outcome(one, Token(9))
    assert first is not None
    assert first.prompt_logprobs == (None, ONE, OTHER)
    assert second is not None
    assert second.prompt_logprobs is None


def test_without_tokens_scores_come_with_the_end() -> None:
    one = sequence(0, **READING)
    event = apply_outcome(one, Scores((ONE, OTHER), Token(8)))
    assert event is not None
    assert (event.token_id, event.finish, event.prefix) == (None, FinishReason.LENGTH, REPORT)
    assert event.prompt_logprobs == (None, ONE, OTHER)
    assert one.token_ids == [*PROMPT]


def test_a_vector_ends_its_request() -> None:
    vector = np.ones(3, np.float32)
    event = apply_outcome(sequence(0), Vector(vector))
    assert event is not None
    assert event.embedding is vector
    assert (event.token_id, event.finish) == (None, FinishReason.STOP)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (NOT_FINITE, "the model's output was not finite"),
        (RowError("no rules"), "no rules"),
        (Scores((ONE,), NOT_FINITE), "the model's output was not finite"),
    ],
)
def test_a_row_without_a_result_ends_with_an_error(
    outcome: RowError | Scores, message: str
) -> None:
    event = apply_outcome(sequence(), outcome)
    assert event is not None
    assert (event.finish, event.message) == (FinishReason.ERROR, message)


# --- what a plan says of a sequence ------------------------------------------------------------


def test_only_what_is_not_known_is_scored_and_never_the_last_token() -> None:
    def scored(one: Sequence, stop: int) -> tuple[int, tuple[int, ...]] | None:
        scoring = plan_entry(one, stop, newest_plan=0).scoring
        return None if scoring is None else (scoring.start, scoring.next_tokens)

    assert scored(sequence(), 3) is None
    one = sequence(**READING)
    assert scored(one, 1) == (0, (6,))
    assert scored(one, 3) == (0, (6, 7))
    one.scored = [ONE]
    assert scored(one, 3) == (1, (7,))
    one.progress.restart_at(2)
    assert scored(one, 3) is None


def test_a_token_that_is_not_known_yet_is_that_of_a_row_of_the_step_before() -> None:
    one = sequence(9)
    entry = plan_entry(one, 3, newest_plan=4)
    assert (entry.tokens, entry.sampling) == (PROMPT, (one.params, 0, False))
    one.progress.scheduled, one.num_output_placeholders, one.sampled_row = 3, 1, 7
    entry = plan_entry(one, 4, newest_plan=5)
    assert (entry.start, entry.count, entry.tokens) == (3, 1, PendingToken(5, 7))
    assert entry.sampling == (one.params, 1, False)


def test_with_penalties_a_sequence_has_the_tokens_that_they_count() -> None:
    assert SamplingRow(sequence(9)).history is None
    one = sequence(9, presence_penalty=1.0)
    one.token_ids += [6, 8, 6]
    for drafts, ids, counts in (
        ((), [5, 6, 7, 8], [0, 2, 0, 1]),
        ((9, 6), [5, 6, 7, 8, 9], [0, 3, 0, 1, 1]),
    ):
        history = SamplingRow(one, drafts).history
        assert history is not None
        assert history.ids.tolist() == ids
        assert history.generated.tolist() == counts


@pytest.mark.parametrize(
    ("changes", "whether"),
    [
        ({}, [False, False, False]),
        ({"frequency_penalty": 0.1}, [True, True, True]),
        ({"min_tokens": 2, "stop_token_ids": frozenset({1})}, [True, True, False]),
        ({"min_tokens": 2}, [False, False, False]),
    ],
)
def test_a_plan_says_whether_choosing_a_token_needs_those_before(
    changes: dict[str, Any], whether: list[bool]
) -> None:
    one = sequence(9, **changes)
    said = []
    for stop in (3, 4, 5):
        sampling = plan_entry(one, stop, newest_plan=0).sampling
        assert sampling is not None
        said.append(sampling.needs_state)
        one.progress.scheduled, one.num_output_placeholders = stop, stop - 2
    assert said == whether


def test_others_may_give_what_needs_no_score() -> None:
    assert sequence().num_reusable is None
    one = sequence(**READING)
    assert one.num_reusable == 0
    one.scored = [ONE]
    assert one.num_reusable == 1
    one.scored = [ONE, OTHER]
    assert one.num_reusable is None


# --- counts of its tokens -----------------------------------------------------------------------


def test_only_what_is_new_is_counted() -> None:
    counts = TokenCounts()
    tokens = [1, 2]
    counts.update(tokens, num_prompt=2)
    for token in (1, 1, 9):
        tokens.append(token)
        counts.update(tokens, num_prompt=2)
        counts.update(tokens, num_prompt=2)
    assert dict(zip(counts.ids, counts.generated, strict=True)) == {1: 2, 2: 0, 9: 1}
