from collections.abc import Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any, cast

import pytest

from engine.client import EngineClient, TokenStream
from engine.types import (
    FinishReason,
    MissReason,
    PrefixReport,
    QueueFullError,
    SamplingParams,
    TokenEvent,
)
from server.chat.generation import Choices, Prompt, prefix_of_all
from server.text.pieces import Delta, TextPiece, Usage
from server.text.pipeline import GenerationError
from server.text.tokenizer import Tokenizer
from tests.server.streams import (
    PreparedClient,
    PreparedStream,
    fault,
    new_times,
    prepared,
    prompt_of,
    said,
    token,
)

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


@pytest.mark.parametrize(
    ("made_s", "rate"),
    [((7.0,), None), ((7.0, 7.0), None), ((7.0, 7.5), 2.0), ((7.0, 8.0, 8.5, 9.0), 1.5)],
)
async def test_the_speed_is_by_the_times_at_which_the_engine_made_the_tokens(
    tokenizer: Tokenizer, made_s: tuple[float, ...], rate: float | None
) -> None:
    choices, (stream,) = prepared(tokenizer, [])
    assert choices.usage.tokens_per_s is None
    for number, at_s in enumerate(made_s, start=1):
        finish = FinishReason.LENGTH if number == len(made_s) else None
        stream.deliver(token(5, finish), at_s)
    await all_of(choices)  # all tokens in one step
    assert choices.usage.tokens_per_s == rate
    assert choices.usage.first_token_s is not None


async def test_an_answer_that_a_stop_string_ends_is_aborted(tokenizer: Tokenizer) -> None:
    batches = [said(tokenizer, "a STOP b", None), said(tokenizer, "c")]
    choices, (stream,) = prepared(tokenizer, batches, stop=("STOP",))
    async with aclosing(choices.steps(PING_S)) as steps:  # type: ignore[type-var]
        (delta,) = await anext(steps)
        assert (delta.finish, stream.closed, choices.finished) == ("stop", True, True)


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


# --- several prompts -------------------------------------------------------------------------


def of_two(
    tokenizer: Tokenizer, client: PreparedClient, first: Prompt, second: Prompt
) -> tuple[Choices, list[PreparedStream]]:
    engine = cast(EngineClient, client)
    return Choices(engine, tokenizer, first, second, times=new_times()), client.streams


def test_prompts_are_handed_over_together_or_not_at_all(tokenizer: Tokenizer) -> None:
    class Full(PreparedClient):
        def submit(self, *args: Any, **how: Any) -> Sequence[TokenStream]:
            if self.streams:
                raise QueueFullError
            return super().submit(*args, **how)

    client, one = Full([]), prompt_of((1,), SamplingParams(9))
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
