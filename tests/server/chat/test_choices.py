import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any, cast

import pytest

from engine.client import EngineClient, TokenStream
from engine.errors import QueueFullError
from engine.types import MissReason, PrefixReport, PrefixSalt, SamplingParams, TokenEvent
from server.chat.choices import Choices, choice_params, prefix_of_all
from server.chat.generation import GenerationError, Prompt
from server.text.pieces import Delta, TextPiece, Usage
from server.text.tokenizer import Tokenizer
from tests.server.harness import DEADLINE_S, Engine, decoded, ids_of
from tests.server.streams import PreparedClient, PreparedStream, fault, prepared, said, token

PING_S = 1000.0  # silence is prepared


async def all_of(choices: Choices, ping_s: float = PING_S) -> list[list[Delta]]:
    return [deltas async for deltas in choices.steps(ping_s)]


def texts(steps: list[list[Delta]], count: int) -> list[str]:
    """What each choice says."""
    found = [""] * count
    for delta in (delta for deltas in steps for delta in deltas):
        for piece in delta.pieces:
            assert isinstance(piece, TextPiece)
            found[delta.index] += piece.text
    return found


def side_by_side(tokenizer: Tokenizer, *answers: str) -> list[list[TokenEvent]]:
    """Batches of one token of each answer."""
    events = [said(tokenizer, text, choice=index) for index, text in enumerate(answers)]
    return [[event for event in batch if event] for batch in zip_longest(*events)]


# --- one answer ------------------------------------------------------------------------------


async def test_one_answer_has_one_delta_a_step(tokenizer: Tokenizer) -> None:
    choices, _ = prepared(tokenizer, [said(tokenizer, "Hel", None), said(tokenizer, "lo")])
    steps = await all_of(choices)
    assert [len(deltas) for deltas in steps] == [1, 1]
    assert texts(steps, 1) == ["Hello"]
    assert choices.usage == Usage(3, 5, 0)


async def test_silence_is_a_step_without_deltas(tokenizer: Tokenizer) -> None:
    choices, _ = prepared(tokenizer, [[], [], said(tokenizer, "a")])
    assert [len(deltas) for deltas in await all_of(choices)] == [0, 0, 1]


async def test_a_fault_closes_everything(tokenizer: Tokenizer) -> None:
    choices, (stream,) = prepared(tokenizer, [said(tokenizer, "ab", None), [fault("broken")]])
    with pytest.raises(GenerationError, match="broken"):
        await all_of(choices)
    assert stream.closed


async def test_a_reader_that_stops_early_ends_the_request(tokenizer: Tokenizer) -> None:
    choices, (stream,) = prepared(tokenizer, [said(tokenizer, "a", None)] * 2)
    async with aclosing(choices.steps(PING_S)) as steps:  # type: ignore[type-var]
        await anext(steps)
        assert not stream.closed
    assert stream.closed


# --- several ---------------------------------------------------------------------------------


async def test_a_step_has_a_delta_of_every_choice_that_grew(tokenizer: Tokenizer) -> None:
    batches = side_by_side(tokenizer, "abc", "d", "ef")
    choices, _ = prepared(tokenizer, batches, choices=3)
    steps = await all_of(choices)
    assert [[delta.index for delta in deltas] for deltas in steps] == [[0, 1, 2], [0, 2], [0]]
    assert texts(steps, 3) == ["abc", "d", "ef"]


async def test_a_prompt_counts_once_and_its_answers_add_up(tokenizer: Tokenizer) -> None:
    batches = side_by_side(tokenizer, "<think>a</think>b", "c", "<think>de")
    choices, _ = prepared(tokenizer, batches, choices=3, chat="assistant\n")
    await all_of(choices)
    assert choices.usage == Usage(3, 4 + 1 + 3, 2 + 0 + 2)


async def test_what_the_cache_had_is_what_the_first_choice_found(tokenizer: Tokenizer) -> None:
    first, second = (PrefixReport(n, n, MissReason.EVICTED) for n in (1, 2))
    step = [token(5, choice=1, prefix=second), token(5, choice=0, prefix=first)]
    choices, _ = prepared(tokenizer, [step], choices=2)
    assert choices.usage.prefix is None
    async with aclosing(choices.steps(PING_S)) as steps:  # type: ignore[type-var]
        await anext(steps)
    assert choices.usage.prefix == first


async def test_a_stop_string_cuts_its_own_choice_only(tokenizer: Tokenizer) -> None:
    batches = side_by_side(tokenizer, "a STOP b", "one more answer")
    choices, (first, second) = prepared(tokenizer, batches, stop=("STOP",), choices=2)
    closed = []
    steps = []
    async for deltas in choices.steps(PING_S):
        steps.append(deltas)
        closed.append((first.closed, second.closed))
    assert texts(steps, 2) == ["a ", "one more answer"]
    assert closed[len("a STOP") - 2 :][:2] == [(False, False), (True, False)]
    finishes = {d.index: d.finish for deltas in steps for d in deltas if d.finish}
    assert finishes == {0: "stop", 1: "length"}
    assert choices.usage.completion_tokens == len("a STOP") + len("one more answer")


async def test_a_fault_of_one_choice_ends_all(tokenizer: Tokenizer) -> None:
    batches = [said(tokenizer, "a", None), [token(5, choice=1), fault("broken")]]
    choices, streams = prepared(tokenizer, batches, choices=3)
    with pytest.raises(GenerationError, match="broken"):
        await all_of(choices)
    assert [stream.closed for stream in streams] == [True] * 3


async def test_a_reader_that_leaves_ends_all_choices(tokenizer: Tokenizer) -> None:
    choices, streams = prepared(tokenizer, side_by_side(tokenizer, "abc", "def"), choices=2)
    async with aclosing(choices.steps(PING_S)) as steps:  # type: ignore[type-var]
        await anext(steps)
        assert not any(stream.closed for stream in streams)
    assert all(stream.closed for stream in streams)


# --- several prompts -------------------------------------------------------------------------


def of_two(
    tokenizer: Tokenizer, client: PreparedClient, first: Prompt, second: Prompt
) -> tuple[Choices, list[PreparedStream]]:
    return Choices(cast(EngineClient, client), tokenizer, first, second), client.streams


async def test_the_answers_to_several_prompts_come_side_by_side(tokenizer: Tokenizer) -> None:
    client = PreparedClient(side_by_side(tokenizer, "ab", "c", "def", "gh"))
    params = SamplingParams(9, seed=5)
    first, second = Prompt((1, 2), params, choices=2), Prompt((3,), params, choices=2)
    choices, streams = of_two(tokenizer, client, first, second)
    steps = await all_of(choices)
    assert [[delta.index for delta in deltas] for deltas in steps] == [[0, 1, 2, 3], [0, 2, 3], [2]]
    assert texts(steps, 4) == ["ab", "c", "def", "gh"]
    assert choices.usage == Usage(3, 8, 0)
    assert [stream.request.prompt_ids for stream in streams] == [(1, 2)] * 2 + [(3,)] * 2
    assert [stream.request.params.seed for stream in streams] == [5, 6, 5, 6]


async def test_a_fault_with_one_prompt_ends_the_answers_to_all(tokenizer: Tokenizer) -> None:
    client = PreparedClient([said(tokenizer, "a", None), [fault("broken")]])
    one = Prompt((1,), SamplingParams(9))
    choices, streams = of_two(tokenizer, client, one, one)
    with pytest.raises(GenerationError, match="broken"):
        await all_of(choices)
    assert [stream.closed for stream in streams] == [True] * 2


def test_prompts_are_handed_over_together_or_not_at_all(tokenizer: Tokenizer) -> None:
    class Full(PreparedClient):
        def submit_choices(self, *args: Any, **how: Any) -> Sequence[TokenStream]:
            if self.streams:
                raise QueueFullError
            return super().submit_choices(*args, **how)

    client, one = Full([]), Prompt((1,), SamplingParams(9))
    with pytest.raises(QueueFullError):
        of_two(tokenizer, client, one, one)
    assert [stream.closed for stream in client.streams] == [True]


NOTHING = PrefixReport(3, 3, None)
LACKING = PrefixReport(4, 5, MissReason.EVICTED)


@pytest.mark.parametrize(
    ("reports", "together"),
    [
        ([], None),
        ([NOTHING], NOTHING),
        ([LACKING, NOTHING], PrefixReport(7, 5, MissReason.EVICTED)),
        ([NOTHING, LACKING, LACKING], PrefixReport(11, 5, MissReason.EVICTED)),
    ],
)
def test_what_the_cache_had_adds_up_over_prompts(
    reports: list[PrefixReport], together: PrefixReport | None
) -> None:
    assert prefix_of_all(reports) == together


async def test_the_answers_to_real_prompts_are_those_that_each_gets_alone(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.client.attach()
    params = SamplingParams(12, temperature=2.0, seed=3)
    prompts = [Prompt((1, 2, 3), params, choices=2), Prompt((4,) * 40, params, choices=2)]

    async def answers(*prompts: Prompt) -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            steps = await all_of(Choices(engine.client, tokenizer, *prompts))
        return texts(steps, 2 * len(prompts))

    together = await answers(*prompts)
    assert together == [*await answers(prompts[0]), *await answers(prompts[1])]
    assert len(set(together)) == 4


# --- what the engine is asked for ------------------------------------------------------------


async def test_the_engine_hears_with_whom_the_prompt_is_shared(tokenizer: Tokenizer) -> None:
    client = PreparedClient([])
    salt = PrefixSalt(b"tenant", b"client")
    params = SamplingParams(1, seed=7)
    prompt = Prompt((1, 2), params, choices=3, salt=salt, system_tokens=2, priority=-4)
    Choices(cast(EngineClient, client), tokenizer, prompt)
    requests = [stream.request for stream in client.streams]
    assert [(request.salt, request.system_tokens) for request in requests] == [(salt, 2)] * 3
    assert [request.params.seed for request in requests] == [7, 8, 9]
    assert [request.priority for request in requests] == [-4] * 3
    assert [request.constraint for request in requests] == [None] * 3


def test_the_seeds_of_choices_follow_each_other_and_wrap_around() -> None:
    params = SamplingParams(5, top_k=3, seed=2**64 - 1)
    assert choice_params(params, 0) == params
    assert choice_params(params, 1) == SamplingParams(5, top_k=3, seed=0)


async def test_sampled_choices_differ_and_each_is_what_its_seed_alone_gives(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.client.attach()
    ids = tuple(ids_of(tokenizer, "Once upon"))

    async def answers(**how: Any) -> list[str]:
        prompt = Prompt(ids, SamplingParams(12, temperature=2.0, seed=how.pop("seed")), **how)
        choices = Choices(engine.client, tokenizer, prompt)
        async with asyncio.timeout(DEADLINE_S):
            return texts(await all_of(choices), prompt.choices)

    together = await answers(seed=40, choices=3)
    assert len(set(together)) == 3
    assert together == [(await answers(seed=seed))[0] for seed in (40, 41, 42)]


async def test_greedy_choices_are_equal(engine: Engine, tokenizer: Tokenizer) -> None:
    engine.client.attach()
    prompt = Prompt((1, 2, 3), SamplingParams(8, temperature=0.0), choices=3)
    found = texts(await all_of(Choices(engine.client, tokenizer, prompt)), 3)
    assert len(set(found)) == 1
    assert decoded(tokenizer, ids_of(tokenizer, found[0])) == found[0] != ""
