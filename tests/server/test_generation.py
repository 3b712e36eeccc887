from contextlib import aclosing

import pytest

from engine.types import FinishReason, TokenEvent
from server.generation import Delta, Generation, GenerationError, Usage
from server.text.parser import Part, Piece
from server.text.tokenizer import Tokenizer
from tests.server.harness import ids_of, token_id
from tests.server.streams import fault, prepared, said, token

PING_S = 1.0


async def all_of(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation.deltas(PING_S)]


def content(text: str) -> Piece:
    return Piece(Part.CONTENT, text)


async def test_the_tokens_of_one_step_make_one_delta(tokenizer: Tokenizer) -> None:
    generation, _ = prepared(
        tokenizer, [said(tokenizer, "Hel", None), said(tokenizer, "lo", FinishReason.STOP)]
    )
    first, last = await all_of(generation)
    assert (first.pieces, first.finish) == ([content("Hel")], None)
    assert (last.pieces, last.finish) == ([content("lo")], "stop")
    assert generation.usage == Usage(3, 5, 0)


async def test_silence_is_a_delta_of_its_own(tokenizer: Tokenizer) -> None:
    generation, _ = prepared(tokenizer, [[], [], said(tokenizer, "a")])
    assert [delta.waiting for delta in await all_of(generation)] == [True, True, False]


async def test_nothing_is_taken_after_a_stop_string(tokenizer: Tokenizer) -> None:
    generation, stream = prepared(tokenizer, [said(tokenizer, "a STOP b", None)], stop=("STOP",))
    (delta,) = await all_of(generation)
    assert (delta.pieces, delta.finish) == ([content("a ")], "stop")
    assert generation.usage.completion_tokens == len("a STOP")
    assert stream.closed


async def test_what_may_begin_a_stop_string_is_held_back_until_the_end(
    tokenizer: Tokenizer,
) -> None:
    batches = [said(tokenizer, "a ST", None), said(tokenizer, "O")]
    generation, _ = prepared(tokenizer, batches, stop=("STOP",))
    first, last = await all_of(generation)
    assert first.pieces == [content("a ")]
    assert (last.pieces, last.finish) == ([content("STO")], "length")


async def test_a_stop_token_is_counted_and_is_no_text(tokenizer: Tokenizer) -> None:
    end = token_id(tokenizer, "Z")
    batches = [[token(ids_of(tokenizer, "a")[0], None, -1.0), token(end, FinishReason.STOP, -2.0)]]
    generation, _ = prepared(tokenizer, batches, stop_token_ids=frozenset({end}))
    (delta,) = await all_of(generation)
    assert (delta.pieces, delta.finish) == ([content("a")], "stop")
    assert [report.logprobs.logprob for report in delta.tokens] == [-1.0]
    assert generation.usage.completion_tokens == 2


async def test_the_thoughts_of_a_chat_are_apart_and_counted(tokenizer: Tokenizer) -> None:
    batches = [said(tokenizer, "<think>Hm</think>Yes")]
    generation, _ = prepared(tokenizer, batches, chat="assistant\n")
    (delta,) = await all_of(generation)
    assert delta.pieces == [Piece(Part.REASONING, "Hm"), content("Yes")]
    assert generation.usage.reasoning_tokens == len("Hm") + 1  # with the closing tag


async def test_half_a_character_is_replaced_at_the_very_end_only(tokenizer: Tokenizer) -> None:
    first, second, *_ = ids_of(tokenizer, "😀")
    generation, _ = prepared(tokenizer, [[token(first)], [token(second, FinishReason.LENGTH)]])
    assert [delta.pieces for delta in await all_of(generation)] == [
        [],
        [content("\N{REPLACEMENT CHARACTER}")],
    ]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (fault("a step failed"), "a step failed"),
        (TokenEvent(1, None, FinishReason.ABORTED), "the request was aborted"),
    ],
)
async def test_a_fault_is_raised_and_never_an_end(
    tokenizer: Tokenizer, event: TokenEvent, message: str
) -> None:
    generation, stream = prepared(tokenizer, [[*said(tokenizer, "ab", None), event]])
    with pytest.raises(GenerationError, match=message):
        await all_of(generation)
    assert stream.closed


async def test_a_reader_that_stops_early_ends_the_request(tokenizer: Tokenizer) -> None:
    generation, stream = prepared(tokenizer, [said(tokenizer, "a", None)] * 2)
    async with aclosing(generation.deltas(PING_S)) as deltas:  # type: ignore[type-var]
        await anext(deltas)
        assert not stream.closed
    assert stream.closed
