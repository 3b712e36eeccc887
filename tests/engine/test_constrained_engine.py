"""Constraints in whole engines on RecallModel: every token is foretold, and accepted once."""

import random
import time

import numpy as np
import pytest

from engine.types import FinishReason, Request, SamplingParams
from tests.engine.test_recall_engine import assert_empty
from tests.engines import (
    BLOCK_BYTES,
    SHAPE,
    VOCAB,
    Allowed,
    Answers,
    Scripted,
    every_third,
    recall_client,
    recall_loop,
    request_of,
    run_dry,
    steps,
)
from tests.recall import recall

LAYERS = len(SHAPE.layers)
WAIT_S = 10.0


def foretold(prompt: list[int], count: int, allowed: Allowed) -> list[int]:
    """What a greedy request says: RecallModel gives one token a logit of 1, all others 0."""
    tokens: list[int] = []
    for _ in range(count):
        wanted = recall([*prompt, *tokens], LAYERS, VOCAB)
        may = allowed(tokens)
        tokens.append(wanted if may is None or wanted in may else min(may))
    return tokens


@pytest.fixture(params=[False, True], ids=["one by one", "overlapping"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether steps overlap."""
    return bool(request.param)


def bound(number: int, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens, temperature=0.0)
    return request_of(number, tuple(prompt), params, constraint=Scripted(every_third(VOCAB)))


def constraint_of(request: Request) -> Scripted:
    assert isinstance(request.constraint, Scripted)
    return request.constraint


def test_ragged_prompts_in_chunks_with_others_beside_them(overlap: bool) -> None:
    rng = random.Random(1)
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=overlap, max_num_batched_tokens=16)
    asked = {}
    for number in range(1, 21):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 120))]
        request = bound(number, prompt, 12)
        if number % 3 == 0:
            request = request_of(number, request.prompt_ids, *request.params)
        asked[number] = request
        loop.mailbox.put(request)
    run_dry(loop)
    for number, request in asked.items():
        free = request.constraint is None
        want = foretold(
            list(request.prompt_ids), 12, (lambda _: None) if free else every_third(VOCAB)
        )
        assert answers.tokens[number] == want
        assert free or constraint_of(request).accepted == want
    assert_empty(loop)


def test_tokens_are_accepted_once_through_preemptions(overlap: bool) -> None:
    answers = Answers.empty()
    loop = recall_loop(
        answers, overlap=overlap, kv_budget_bytes=16 * BLOCK_BYTES, max_model_len=250
    )
    asked = {n: bound(n, list(range(n, n + 40)), 60) for n in range(1, 9)}
    for request in asked.values():
        loop.mailbox.put(request)
    run_dry(loop)
    assert loop._scheduler.counters.preemptions > 0, "the pool was meant to be too small"
    for number, request in asked.items():
        want = foretold(list(request.prompt_ids), 60, every_third(VOCAB))
        assert answers.tokens[number] == constraint_of(request).accepted == want
    assert_empty(loop)


def test_no_constraint_is_asked_for_a_mask_when_its_answer_has_ended(overlap: bool) -> None:
    class Asked(Scripted):
        def fill_mask(self, row: np.ndarray) -> bool:
            asked.append(len(self.accepted))
            return super().fill_mask(row)

    asked: list[int] = []
    answers = Answers.empty()
    loop = recall_loop(answers, overlap=overlap)
    constraint = Asked(lambda accepted: {9} if len(accepted) == 3 else {4, 5})
    params = SamplingParams(50, temperature=0.0, stop_token_ids=frozenset({9}))
    loop.mailbox.put(request_of(1, (1, 2, 3), params, constraint=constraint))
    loop.mailbox.put(bound(2, [7], 12))
    run_dry(loop)
    assert asked == [0, 1, 2, 3]
    assert constraint.accepted[3:] == [9]
    assert answers.finished[1] is FinishReason.STOP
    assert loop.stats.wasted_rows == overlap, "its row of the step in flight"
    assert answers.tokens[2] == foretold([7], 12, every_third(VOCAB))


def test_costly_masks_take_turns_and_change_no_token(overlap: bool) -> None:
    class Costly(Scripted):
        def fill_mask(self, row: np.ndarray) -> bool:
            end_s = time.thread_time() + 0.002
            while time.thread_time() < end_s:
                pass
            return super().fill_mask(row)

    answers = Answers.empty()
    loop = recall_loop(answers, overlap=overlap, max_step_mask_s=0.003)
    for number in (1, 2, 3):
        constraint = Costly(every_third(VOCAB))
        params = SamplingParams(12, temperature=0.0)
        loop.mailbox.put(request_of(number, (number, 2), params, constraint=constraint))
    loop.mailbox.put(request_of(4, (4, 2), SamplingParams(12, temperature=0.0)))
    rested = 0
    for _ in steps(loop):
        rested += len(loop._scheduler._resting)
    assert rested > 10
    for number in (1, 2, 3):
        assert answers.tokens[number] == foretold([number, 2], 12, every_third(VOCAB))
    assert answers.tokens[4] == foretold([4, 2], 12, lambda _: None)


async def test_every_choice_follows_a_copy_of_its_own() -> None:
    client = recall_client()
    client.attach()
    given = Scripted(every_third(VOCAB))
    prompt = tuple(range(40))
    params = tuple(SamplingParams(20, seed=seed) for seed in range(4))
    streams = client.submit(Request(prompt, params, constraint=given))
    heard: list[list[int]] = []
    for stream in streams:
        tokens: list[int] = []
        while events := await stream.next_batch(WAIT_S):
            tokens += [event.token_id for event in events if event.token_id is not None]
        heard.append(tokens)
    assert client.stop(WAIT_S)
    assert [each.accepted for each in (given, *given.copies)] == heard
    assert len({tuple(tokens) for tokens in heard}) == 4
    allowed = every_third(VOCAB)
    for tokens in heard:
        for place, token in enumerate(tokens):
            assert token in (allowed(tokens[:place]) or ())
