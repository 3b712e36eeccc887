import asyncio
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
    Request,
    SamplingParams,
    TokenEvent,
)
from server.chat.generation import (
    Choices,
    Generation,
    GenerationError,
    Prompt,
    choice_params,
    prefix_of_all,
)
from server.metrics.answer_times import Latencies, RequestTimes
from server.text.conversation import Channel
from server.text.parser import ParseOptions
from server.text.pieces import Delta, TextPiece, ToolCallArguments, Usage, join_pieces
from server.text.tokenizer import Tokenizer
from tests.server.harness import ids_of, token_id
from tests.server.streams import (
    PreparedClient,
    PreparedStream,
    fault,
    parse_options,
    prepared,
    prompt_of,
    said,
    scored,
    token,
)
from tests.server.text.calling import LOOK


def started(
    tokenizer: Tokenizer,
    *,
    stop: tuple[str, ...] = (),
    chat: str | ParseOptions | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    index: int = 0,
    max_tokens: int = 100,
) -> tuple[Generation, PreparedStream]:
    """A generation whose events are handed to it. chat: how they are read, or the rendered prompt
    alone, where thoughts are split off."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    stream = PreparedStream(Request(1, (1, 2, 3), params), lambda _: None, 1, asyncio.Event())
    (times,) = RequestTimes(Latencies(100)).answers_to(3, 1, b"")
    return Generation(
        stream, tokenizer, prompt_of((1, 2, 3), params, stop, parse_options(chat)), times, index
    ), stream


def content(text: str) -> TextPiece:
    return TextPiece(Channel.CONTENT, text)


def test_the_events_of_one_step_make_one_delta(tokenizer: Tokenizer) -> None:
    generation, stream = started(tokenizer, index=2)
    first = generation.take(said(tokenizer, "Hel", None))
    assert first == Delta([content("Hel")], index=2, token_ids=tuple(ids_of(tokenizer, "Hel")))
    assert not generation.finished
    assert not stream.closed
    last = generation.take(said(tokenizer, "lo", FinishReason.STOP))
    ids = tuple(ids_of(tokenizer, "lo"))
    assert last == Delta([content("lo")], finish="stop", index=2, token_ids=ids)
    assert generation.finished
    assert stream.closed
    assert generation.completion_tokens == 5


def test_nothing_is_taken_after_a_stop_string(tokenizer: Tokenizer) -> None:
    generation, stream = started(tokenizer, stop=("STOP",))
    delta = generation.take(said(tokenizer, "a STOP b", None))
    assert (delta.pieces, delta.finish) == ([content("a ")], "stop")
    assert delta.stop_string == "STOP"
    assert generation.completion_tokens == len("a STOP")
    assert stream.closed


def test_what_may_begin_a_stop_string_is_held_back_until_the_end(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer, stop=("STOP",))
    assert generation.take(said(tokenizer, "a ST", None)).pieces == [content("a ")]
    last = generation.take(said(tokenizer, "O"))
    assert (last.pieces, last.finish) == ([content("STO")], "length")
    assert last.stop_string is None


@pytest.mark.parametrize(("chat", "reported"), [(None, [-1.0, -2.0]), ("assistant\n", [-1.0])])
def test_the_stop_token_is_one_of_the_tokens_of_a_text_and_none_of_a_chats(
    tokenizer: Tokenizer, chat: str | None, reported: list[float]
) -> None:
    end, letter = token_id(tokenizer, "<|im_end|>"), ids_of(tokenizer, "a")[0]
    generation, _ = started(tokenizer, chat=chat, stop_token_ids=frozenset({end}))
    delta = generation.take([token(letter, None, -1.0), token(end, FinishReason.STOP, -2.0)])
    assert [report.logprobs.logprob for report in delta.tokens] == reported
    assert [report.offset for report in delta.tokens] == [0, 1][: len(reported)]


def test_a_token_begins_where_its_first_character_does(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer, stop=("é STOP",))
    ids = ids_of(tokenizer, "aé!<|im_end|>b")
    delta = generation.take([token(i, None, -1.0) for i in ids])
    assert [report.offset for report in delta.tokens] == [0, 1, 1, 2, 3, 3]


def test_what_a_prompt_scored_comes_with_the_first_delta(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer)
    first = scored(-1.0, -2.0, token_id=ids_of(tokenizer, "a")[0])
    delta = generation.take([first, *said(tokenizer, "b", None)])
    assert delta.pieces == [content("ab")]
    assert [value and value.logprob for value in delta.prompt] == [None, -1.0, -2.0]
    assert generation.take(said(tokenizer, "c")).prompt == ()


def test_an_answer_without_tokens_ends_with_what_its_prompt_scored(tokenizer: Tokenizer) -> None:
    generation, stream = started(tokenizer, max_tokens=0)
    delta = generation.take([scored(-1.0, finish=FinishReason.LENGTH)])
    assert (delta.pieces, delta.tokens, delta.finish) == ([], [], "length")
    assert [value and value.logprob for value in delta.prompt] == [None, -1.0]
    assert generation.completion_tokens == 0
    assert stream.closed


def test_an_answer_that_should_have_tokens_does_not_end_without_one(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer)
    with pytest.raises(AssertionError):
        generation.take([scored(-1.0, finish=FinishReason.LENGTH)])


def test_thoughts_that_never_end_are_flushed_with_the_end(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer, chat="assistant\n<think>\n")
    delta = generation.take(said(tokenizer, "Hm </"))
    assert (delta.pieces, delta.finish) == ([TextPiece(Channel.REASONING, "Hm </")], "length")


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


THINKS = ParseOptions("<think>\n", (LOOK,))


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    "stop", ["Hm", "m.\n", "\n", "</think>", "<tool_call>", "look", "}}", ' "']
)
def test_a_stop_string_ends_neither_thoughts_nor_calls(
    tokenizer: Tokenizer, stop: str, step: int
) -> None:
    generation, _ = started(tokenizer, chat=THINKS, stop=(stop,))
    events = said(tokenizer, f"Hm.\n</think>\n\n{CALL}\n{CALL}", FinishReason.STOP)
    deltas = [generation.take(events[n : n + step]) for n in range(0, len(events), step)]
    pieces = join_pieces([piece for delta in deltas for piece in delta.pieces])
    assert pieces[0] == TextPiece(Channel.REASONING, "Hm.")
    assert pieces[2::2] == [ToolCallArguments(0, "{}"), ToolCallArguments(1, "{}")]
    assert (deltas[-1].finish, deltas[-1].stop_string) == ("tool_calls", None)


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("Hm STOP.\n</think>\n\nWell STOP", "Well ", "stop"),
        ("</think>Well STOP " + CALL, "Well ", "stop"),
        (f"</think>{CALL}\nDone STOP. {CALL}", "Done ", "tool_calls"),
        (f"</think>ST{CALL}OP STOP", "STOP ", "tool_calls"),
        ("</think><tool_call>STOP</tool_call>", "<tool_call>", "stop"),
        ("</think><tool_call>{STOP", "<tool_call>{", "stop"),
        ("</think><tool_call>{STOP " + CALL, "<tool_call>{", "stop"),
        ("</think>Well STO", "Well STO", "length"),
    ],
)  # fmt: skip
def test_a_stop_string_ends_what_is_said(
    tokenizer: Tokenizer, text: str, content: str, reason: str, step: int
) -> None:
    generation, stream = started(tokenizer, chat=THINKS, stop=("STOP",))
    deltas: list[Delta] = []
    events = said(tokenizer, text, FinishReason.LENGTH)
    while not generation.finished:
        deltas.append(generation.take(events[:step]))
        events = events[step:]
    pieces = [piece for delta in deltas for piece in delta.pieces if isinstance(piece, TextPiece)]
    found = "".join(piece.text for piece in pieces if piece.channel is Channel.CONTENT)
    assert (found, deltas[-1].finish) == (content, reason)
    assert deltas[-1].stop_string == (None if reason == "length" else "STOP")
    assert stream.closed


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_nothing_is_taken_after_the_last_call_that_is_allowed(
    tokenizer: Tokenizer, finish: FinishReason | None
) -> None:
    generation, stream = started(tokenizer, chat=ParseOptions("</think>", (LOOK,), max_calls=1))
    arguments_end = CALL.index("}}") + 1
    last = said(tokenizer, CALL[:arguments_end], finish)
    delta = generation.take([*last, *said(tokenizer, CALL[arguments_end:] + "more", None)])
    assert (len(delta.pieces), delta.finish) == (2, "tool_calls")
    assert generation.completion_tokens == arguments_end
    assert stream.closed


def test_what_the_cache_had_comes_with_the_first_token(tokenizer: Tokenizer) -> None:
    generation, _ = started(tokenizer)
    assert generation.prefix is None
    report = PrefixReport(2, 2, MissReason.NEVER_CACHED)
    generation.take([token(1, prefix=report)])
    generation.take([token(1)])
    assert generation.prefix == report


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (fault("a step failed"), "a step failed"),
        (TokenEvent(1, None, FinishReason.ABORTED), "the request was aborted"),
    ],
)
def test_a_fault_is_raised_and_never_an_end(
    tokenizer: Tokenizer, event: TokenEvent, message: str
) -> None:
    generation, _ = started(tokenizer)
    with pytest.raises(GenerationError, match=message):
        generation.take([*said(tokenizer, "ab", None), event])
    assert not generation.finished


@pytest.mark.parametrize("batches", [1, 2, 100])
def test_a_piece_of_content_knows_its_tokens_however_steps_come_together(
    tokenizer: Tokenizer, batches: int
) -> None:
    chat = ParseOptions("assistant\n", (LOOK,))
    text = f"<think>Hm</think>\n\nAb\n{CALL}\ncd STOP"
    generation, _ = started(tokenizer, chat=chat, stop=("STOP",))
    ids = ids_of(tokenizer, text)
    events = [token(number, None, -1.0) for number in ids]
    size = -(-len(events) // batches)
    pieces = []
    for start in range(0, len(events), size):
        pieces += generation.take(events[start : start + size]).pieces
    said = [
        p for p in join_pieces(pieces) if isinstance(p, TextPiece) and p.channel is Channel.CONTENT
    ]
    texts = ["".join(tokenizer.fast.decode([t.token_id]) for t in p.tokens) for p in said]
    assert [piece.text for piece in said] == ["Ab", "cd "]
    assert texts == ["\n\nAb", "\ncd "]


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
    return Choices(cast(EngineClient, client), tokenizer, first, second), client.streams


def test_prompts_are_handed_over_together_or_not_at_all(tokenizer: Tokenizer) -> None:
    class Full(PreparedClient):
        def submit_choices(self, *args: Any, **how: Any) -> Sequence[TokenStream]:
            if self.streams:
                raise QueueFullError
            return super().submit_choices(*args, **how)

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


# --- what the engine is asked for ------------------------------------------------------------


def test_the_seeds_of_choices_follow_each_other_and_wrap_around() -> None:
    params = SamplingParams(5, top_k=3, seed=2**64 - 1)
    assert choice_params(params, 2) == (params, SamplingParams(5, top_k=3, seed=0))
