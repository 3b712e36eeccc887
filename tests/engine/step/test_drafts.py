"""Which drafts are proposed, and when none are."""

from random import Random
from typing import Any

import pytest

from engine.step.draft_texts import MATCH_TOKENS, PREDICTION_MATCH_TOKENS, READ_AT_ONCE
from engine.step.drafts import MAX_DRAFTS, RowCosts, TextDrafts
from engine.step.sequence import Sequence
from engine.types import Request, SamplingParams

TEXT = [*range(100, 140)]


def sequence(prompt: list[int], answer: list[int], prediction: tuple[int, ...] = ()) -> Sequence:
    request = Request(tuple(prompt), (SamplingParams(500),), prediction_ids=prediction)
    made = Sequence(request, 0, 0, 1000)
    made.token_ids += answer
    return made


def drafts_of(one: Sequence, running: int = 1, room: int = 100, **costs: Any) -> tuple[int, ...]:
    return TextDrafts(row_costs(**costs)).propose(one, room, running)


def row_costs(share: float = 0.0) -> RowCosts:
    """Return costs of steps in which each row adds this share of the first one."""
    costs = RowCosts()
    for rows in range(1, 20):
        costs.observe(rows, 1.0 + share * (rows - 1))
    return costs


# --- what is proposed ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", [8, 9, 20, 30, 33])
def test_what_followed_the_same_tokens_is_likely_to_follow_again(place: int) -> None:
    again = TEXT[place - MATCH_TOKENS : place]
    assert drafts_of(sequence(TEXT, [1, *again])) == tuple(TEXT[place : place + MAX_DRAFTS])
    assert drafts_of(sequence(TEXT, [1, *again]), room=2) == tuple(TEXT[place : place + 2])
    assert drafts_of(sequence(TEXT, [1, *again[1:]])) == (), "too few tokens are the same"


def test_the_newest_of_several_places_is_taken() -> None:
    again = TEXT[:MATCH_TOKENS]
    assert drafts_of(sequence([*again, 1, *again, 2, 3], again), room=2) == (2, 3)


def test_a_loop_is_followed() -> None:
    assert drafts_of(sequence([1, 2], [7] * 12)) == (7,)
    assert drafts_of(sequence([1, 2], [7, 8] * 8), room=2) == (7, 8)


def test_a_long_prompt_is_read_in_parts() -> None:
    prompt = [*TEXT, *[1, 2, 3, 4, 5] * (READ_AT_ONCE // 5), *range(200, 220)]
    one = sequence(prompt, [1, *range(200, 200 + MATCH_TOKENS)])
    assert drafts_of(one) == (), "the end of the prompt is not read yet"
    assert drafts_of(one, room=3) == (208, 209, 210)


def test_a_prediction_is_followed_from_the_beginning() -> None:
    for length in range(8):
        one = sequence([1, 2, 3], TEXT[:length], tuple(TEXT))
        assert drafts_of(one) == tuple(TEXT[length : length + MAX_DRAFTS])


@pytest.mark.parametrize("back_at", [0, 4, 9, 22, 30])
def test_an_answer_that_leaves_its_prediction_may_come_back_anywhere(back_at: int) -> None:
    one = sequence([1, 2, 3], TEXT[:6], tuple(TEXT))
    assert drafts_of(one, room=1) == (106,)
    one.token_ids += [7, 8]
    assert drafts_of(one) == ()
    again = TEXT[back_at : back_at + PREDICTION_MATCH_TOKENS]
    one.token_ids += again[:-1]
    assert drafts_of(one) == ()
    one.token_ids += again[-1:]
    end = back_at + PREDICTION_MATCH_TOKENS
    assert drafts_of(one, room=2) == tuple(TEXT[end : end + 2])


def test_after_the_end_of_a_prediction_nothing_is_likely() -> None:
    assert drafts_of(sequence([1], TEXT, tuple(TEXT))) == ()


# --- how many ------------------------------------------------------------------------------------


def test_drafts_are_as_deep_as_pays() -> None:
    def depth(share: float, running: int = 1, acceptance: float = 0.8) -> int:
        one = sequence([1], TEXT[:1], tuple(TEXT))
        one.acceptance = acceptance
        return len(drafts_of(one, running, share=share))

    depths = [depth(share) for share in (0.0, 0.05, 0.2, 0.4, 0.6, 1.0)]
    assert depths == sorted(depths, reverse=True)
    assert (depths[0], depths[-1]) == (MAX_DRAFTS, 0)
    assert depth(0.3, acceptance=0.3) == 0
    assert depth(1.0, running=8) == 0
    by_company = [depth(0.3, running=running) for running in (1, 2, 4, 8, 16)]
    assert by_company[0] > 0, by_company


def test_what_is_not_measured_is_estimated_from_the_nearest() -> None:
    costs = RowCosts()
    assert costs.ratio(1, 3) == pytest.approx(1.3)
    costs.observe(4, 2.6)
    assert costs.ratio(1, 3) == pytest.approx(1.3)
    costs.observe(1, 1.0)
    assert costs.ratio(1, 3) == pytest.approx(2.6)
    for _ in range(100):
        costs.observe(4, 1.5)
    assert costs.ratio(1, 3) == pytest.approx(1.5)


def test_drafts_that_are_rejected_rest_and_are_tried_again() -> None:
    drafter, one = TextDrafts(row_costs(0.25)), sequence([1], [], tuple(TEXT))
    assert drafter.may_follow(one, 1)
    tries = []
    for chance in range(1000):
        if drafts := drafter.propose(one, 100, 1):
            drafter.note(one, len(drafts), 0)
            tries.append(chance)
    assert len([each for each in tries if each < 20]) < 20
    assert 1 <= len([each for each in tries if each >= 500]) <= 25


def test_a_text_without_repetitions_has_no_drafts() -> None:
    rng, drafter = Random(0), TextDrafts(row_costs())
    one = sequence([rng.randrange(50_000) for _ in range(400)], [])
    for _ in range(400):
        one.token_ids.append(rng.randrange(50_000))
        assert not drafter.may_follow(one, 1)
        assert drafter.propose(one, 100, 1) == ()


def test_the_last_event_tells_how_drafts_fared() -> None:
    one = sequence([1], [2])
    assert one.draft_report is None
    one.accepted_drafts, one.rejected_drafts = 3, 1
    assert one.draft_report == (3, 1)
