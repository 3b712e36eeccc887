"""Which drafts are proposed, and when none are."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from engine.step.draft_head import DraftHead
from engine.step.draft_texts import MATCH_TOKENS, PREDICTION_MATCH_TOKENS, READ_AT_ONCE
from engine.step.drafts import (
    MAX_DRAFTS,
    MAX_HEAD_DRAFTS,
    MEASURED_STEPS,
    PLAIN_STEPS,
    Drafts,
)
from engine.step.row_costs import RowCosts
from engine.step.sequence import Acceptance, Sequence
from engine.types import Request, SamplingParams

TEXT = [*range(100, 140)]


def sequence(prompt: list[int], answer: list[int], prediction: tuple[int, ...] = ()) -> Sequence:
    request = Request(tuple(prompt), (SamplingParams(500),), prediction_ids=prediction)
    made = Sequence(request, 0, 0, 1000)
    made.token_ids += answer
    return made


def drafts_of(one: Sequence, running: int = 1, room: int = 100, **costs: Any) -> tuple[int, ...]:
    drafter = Drafts(row_costs(**costs))
    return drafter.propose([(one, drafter.depth(one, room, running, idle=True))])[0]


def row_costs(share: float = 0.0, most: int = 20) -> RowCosts:
    """Return costs of steps in which each row adds this share of the first one."""
    costs = RowCosts()
    for rows in range(1, most):
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
        one.text_drafts.share = acceptance
        return len(drafts_of(one, running, share=share))

    depths = [depth(share) for share in (0.0, 0.05, 0.2, 0.4, 0.6, 1.0)]
    assert depths == sorted(depths, reverse=True)
    assert (depths[0], depths[-1]) == (MAX_DRAFTS, 0)
    assert depth(0.3, acceptance=0.3) == 0
    assert depth(1.0, running=8) == 0
    by_company = [depth(0.3, running=running) for running in (1, 2, 4, 8, 16)]
    assert by_company[0] > 0, by_company


def test_drafts_that_are_rejected_rest_and_are_tried_again() -> None:
    drafter, one = Drafts(row_costs(0.25)), sequence([1], [], tuple(TEXT))
    assert drafter.may_follow(one, 1)
    tries = []
    for chance in range(1000):
        if depth := drafter.depth(one, 100, 1, idle=True):
            drafter.note(one, depth, 0)
            tries.append(chance)
    assert len([each for each in tries if each < 20]) < 20
    assert 1 <= len([each for each in tries if each >= 500]) <= 25


def test_a_text_without_repetitions_has_no_drafts() -> None:
    rng, drafter = Random(0), Drafts(row_costs())
    one = sequence([rng.randrange(50_000) for _ in range(400)], [])
    for _ in range(400):
        one.token_ids.append(rng.randrange(50_000))
        assert not drafter.may_follow(one, 1)
        assert drafter.depth(one, 100, 1, idle=True) == 0


def test_the_last_event_tells_how_drafts_fared() -> None:
    one = sequence([1], [2])
    assert one.draft_report is None
    one.accepted_drafts, one.rejected_drafts = 3, 1
    assert one.draft_report == (3, 1)


# --- the model's own head -------------------------------------------------------------------------


@dataclass
class Head:
    """Drafts the numbers after a sequence's newest token."""

    calls: list[list[int]] = field(default_factory=list)

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        self.calls.append([depth for _, depth in wanted])
        return [tuple(range(s.token_ids[-1] + 1, s.token_ids[-1] + 1 + n)) for s, n in wanted]


def with_head(share: float, pass_cost: float = 0.05, most: int = 40) -> Drafts:
    """Return drafts after the first steps, which have none so that their time is known."""
    costs = row_costs(share, most)
    for rows in range(1, most):
        costs.observe_pass(rows, pass_cost * (1.0 + share * (rows - 1)))
    drafter = Drafts(costs, cast(DraftHead, Head()))
    for _ in range(PLAIN_STEPS):
        assert drafter.depth(sequence([1], [2]), 100, 1, idle=True) == 0
        drafter.observe(1, 1.0, 1.0)
    return drafter


def head_depth(drafter: Drafts, share: float = 0.8, running: int = 1, room: int = 100) -> int:
    one = sequence([1], [2])
    one.head_drafts = Acceptance(share)
    return drafter.depth(one, room, running, idle=True)


def test_a_head_drafts_as_deep_as_pays() -> None:
    by_rows = [head_depth(with_head(share)) for share in (0.02, 0.1, 0.3, 0.6, 1.0)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert (by_rows[0], by_rows[-1]) == (MAX_HEAD_DRAFTS, 0)
    by_pass = [head_depth(with_head(0.1, cost)) for cost in (0.01, 0.2, 0.4, 0.9)]
    assert by_pass == sorted(by_pass, reverse=True)
    assert by_pass[-1] == 0
    drafter = with_head(0.1)
    by_acceptance = [head_depth(drafter, share) for share in (0.95, 0.8, 0.5, 0.1)]
    assert by_acceptance == sorted(by_acceptance, reverse=True)
    assert by_acceptance[-1] == 0
    by_company = [head_depth(with_head(0.25), running=running) for running in (1, 2, 4, 8)]
    assert by_company == sorted(by_company, reverse=True)
    assert head_depth(drafter, room=1) == 1
    assert drafter.depth(sequence([1], [2]), 100, 1, idle=False) == 0


def test_drafts_of_a_head_and_of_texts_keep_their_order() -> None:
    drafter = with_head(0.02)
    own, predicted = sequence([1], [50]), sequence([1, 2], TEXT[:1], tuple(TEXT))
    predicted.text_drafts.share = 0.99
    wanted = [(each, drafter.depth(each, 3, 1, idle=True)) for each in (predicted, own, predicted)]
    text = tuple(TEXT[1:4])
    assert drafter.propose(wanted) == [text, (51, 52, 53), text]
    drafter.note(own, 3, 0)
    assert own.drafted_by.share < own.text_drafts.share


def test_steps_without_drafts_are_measured_now_and_then() -> None:
    drafter, one = with_head(0.02), sequence([1], [2])
    depths = []
    for _ in range(2 * MEASURED_STEPS):
        depths.append(drafter.depth(one, 100, 1, idle=True))
        assert drafter.may_follow(one, 1) == (depths[-1] > 0)
        drafter.observe(1 + depths[-1], 1.0, 1.0)
    assert depths.count(0) == 2 * PLAIN_STEPS
    assert head_depth(drafter, running=60) == 0, "a step with so many rows is not measured yet"


def test_the_time_of_a_head_is_not_that_of_the_step() -> None:
    drafter, one = with_head(0.02), sequence([1], [2])
    for _ in range(20):
        drafter.propose([(one, drafter.depth(one, 2, 1, idle=True))])
        drafter.observe(3, 1.04, 7.0)
    assert drafter.costs.ratio(1, 2) == pytest.approx(1.04, abs=0.02)
    assert 0 < drafter.costs.pass_ratio(1) < 0.05


def test_a_head_whose_drafts_are_rejected_rests() -> None:
    drafter, one = with_head(0.1), sequence([1], [2])
    depths = []
    for _ in range(60):
        depths.append(drafter.depth(one, 4, 1, idle=True))
        drafter.note(one, depths[-1], 0)
    assert depths[0] > 0
    assert sum(depth > 0 for depth in depths[30:]) <= 3, "it is tried now and then"
    assert drafter.depth(sequence([5], [6]), 4, 1, idle=True) == 0, "another sequence knows it"
