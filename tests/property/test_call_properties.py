"""However an answer with calls is cut, it is the same answer, with the calls that it writes."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import FinishReason
from server.protocol.answers import ResponseMetadata
from server.protocol.chat.answer import ChatAnswer
from server.protocol.common import ResponseOptions
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel, Tool
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from server.text.pipeline import ParseOptions
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.property.test_text_properties import before_the_first_stop, cut, cuts
from tests.server.streams import prepared, said
from tests.server.text.calling import LOOK, deltas_of, joined, pieces_of

EXAMPLES = settings(max_examples=150)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FORMS = st.sampled_from(list(ToolFormat))
PROMPTS = st.sampled_from(["assistant\n", "assistant\n<think>\n", "<think>\n\n</think>\n\n"])
FRAGMENTS = [
    *TAGS,
    "<tool_call>\n",
    "\n</tool_call>",
    '{"name": "look", "arguments": {',
    '"at": "x',
    '"',
    "\\",
    "{",
    "}}",
    "}",
    '{"name": "look", "parameters": {',
    '{"name": "look", "parameters": {"at": "x"}}',
    "<|python_tag|>",
    ";",
    "<function=look>\n",
    "<tool_call>\n<function=look>\n<parameter=at>\n",
    "<function=look><parameter=times>",
    "<function=other>",
    "<function=",
    "look>",
    "</function>",
    "<parameter=at>\n",
    "<parameter=times>",
    "\n</parameter>\n",
    "</parameter>",
    "</parameter/>",
    "\n</function>\n</tool_call>",
    "\n  ",
    "x" * 200,
    "</",
    "<",
    ">",
    "5",
    "\n",
    " ",
    "é",
    "😀",
]
answers = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
limits = st.sampled_from([None, 1, 2])
OPTIONS = st.builds(ParseOptions, PROMPTS, st.just((LOOK,)), FORMS, limits)


@pytest.fixture(scope="module", params=["plain tags", "special tags"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "plain tags":
        write_tokenizer(folder, VOCAB)
    else:
        write_tokenizer(folder, VOCAB, special=(*SPECIAL_TOKENS, *TAGS), plain=())
    return Tokenizer(folder)


def parsed(
    parse_options: ParseOptions, parts: list[str], *, goes_on: bool = False
) -> tuple[list[AnswerPiece], str | None]:
    """The pieces of an answer, and why it ended. goes_on: whether the answer was cut off."""
    finish = FinishReason.LENGTH if goes_on else FinishReason.STOP
    deltas = deltas_of(parts, parse_options, finish=finish)
    return pieces_of(deltas), deltas[-1].finish


@given(parse_options=OPTIONS, text=answers, places=cuts, goes_on=st.booleans())
@EXAMPLES
def test_any_cut_gives_the_same_pieces(
    parse_options: ParseOptions, text: str, places: list[int], goes_on: bool
) -> None:
    at_once = parsed(parse_options, [text], goes_on=goes_on)
    assert parsed(parse_options, cut(text, places), goes_on=goes_on) == at_once
    assert parsed(parse_options, list(text), goes_on=goes_on) == at_once


@given(form=FORMS, text=answers)
@EXAMPLES
def test_a_call_begins_before_its_arguments_and_calls_are_counted(
    form: ToolFormat, text: str
) -> None:
    pieces, finish = parsed(ParseOptions("", (LOOK,), form), [text])
    starts = [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    begun = -1
    for piece in pieces:
        if isinstance(piece, ToolCallStart):
            begun = piece.index
        elif isinstance(piece, ToolCallArguments):
            assert piece.index == begun
            assert piece.text
    assert starts or finish == "stop"


# --- what a model means ----------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9_.:/-]{1,20}", fullmatch=True)
plain = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | plain | st.sampled_from(
        ["</tool_call>\n<tool_call>", "a </parameter> b", "</function>\nx", "<parameter", "\n"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
arguments = st.dictionaries(plain, values, max_size=4)
contents = st.sampled_from(["", "Sure.", "é 😀", "a < b"])


@given(
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    before=contents,
    separators=st.sampled_from([(", ", ": "), (",", ":")]),
    places=cuts,
)
@EXAMPLES
def test_hermes_calls_arrive_as_they_were_written(
    calls: list[tuple[str, dict[str, Any]]],
    before: str,
    separators: tuple[str, str],
    places: list[int],
) -> None:
    written = [json.dumps(each, ensure_ascii=False, separators=separators) for _, each in calls]
    text = "\n".join(
        ([before] if before else [])
        + [
            f'<tool_call>\n{{"name": "{name}", "arguments": {each}}}\n</tool_call>'
            for (name, _), each in zip(calls, written, strict=True)
        ]
    )
    wanted: list[AnswerPiece] = [TextPiece(Channel.CONTENT, before)] if before else []
    for index, ((name, _), each) in enumerate(zip(calls, written, strict=True)):
        wanted += [ToolCallStart(index, f"call_{index}", name), ToolCallArguments(index, each)]
    parse_options = ParseOptions("</think>", tuple(Tool(name) for name, _ in calls))
    assert parsed(parse_options, cut(text, places)) == (wanted, "tool_calls")


def typed(value: Any) -> dict[str, Any]:
    """Return a schema that tells the value's type, as far as a template would show it."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return {"type": kinds.get(type(value), "null" if value is None else "object")}


keys = st.text("abc_é-", min_size=1, max_size=5)


@given(arguments=st.dictionaries(keys, values, max_size=4), before=contents, places=cuts)
@EXAMPLES
def test_xml_calls_arrive_with_the_types_of_their_schema(
    arguments: dict[str, Any], before: str, places: list[int]
) -> None:
    schema = {"properties": {key: typed(value) for key, value in arguments.items()}}
    written = [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    ]
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in written)
    text = f"{before}\n<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    parse_options = ParseOptions("</think>", (Tool("f", parameters=schema),), ToolFormat.XML)
    pieces, finish = parsed(parse_options, cut(text, places))
    assert finish == "tool_calls"
    last = pieces[-1]
    assert isinstance(last, ToolCallArguments)
    found = json.loads(last.text)
    assert found == arguments
    assert [type(value) for value in found.values()] == [type(v) for v in arguments.values()]


# --- streamed and whole ----------------------------------------------------------------------


def gathered(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the message of a stream together as a client does, with its end."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        finish = choice["finish_reason"] or finish
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                function = dict(call["function"])
                message["tool_calls"].append({"id": call["id"], "function": function})
            else:
                made = message["tool_calls"][call["index"]]
                made["function"]["arguments"] += call["function"]["arguments"]
    return message | {"finish": finish}


def whole(answer: ChatAnswer) -> dict[str, Any]:
    (choice,) = answer.whole(Usage(1, 1, 0))["choices"]
    message = choice["message"]
    calls = [{"id": c["id"], "function": c["function"]} for c in message.get("tool_calls", [])]
    assert (message["content"] is None) <= bool(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "tool_calls": calls,
        "finish": choice["finish_reason"],
    }


@given(
    text=answers.filter(bool),
    stops=st.lists(
        st.sampled_from(["}", '"at"', "</tool_call>", "\n", "x5", "</think>"]), max_size=2
    ).map(tuple),
    parse_options=OPTIONS,
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    places=cuts,
)
@EXAMPLES
def test_a_stream_and_a_whole_answer_are_one_answer(
    tokenizer: Tokenizer,
    text: str,
    stops: tuple[str, ...],
    parse_options: ParseOptions,
    finish: FinishReason,
    places: list[int],
) -> None:
    events = said(tokenizer, text, finish)
    ends = sorted({min(place, len(events) - 1) for place in places})
    steps = [events[a:b] for a, b in zip([0, *ends], [*ends, len(events)], strict=True)]

    async def deltas() -> list[Delta]:
        choices, _ = prepared(tokenizer, steps, stop=stops, chat=parse_options)
        return [delta async for step in choices.steps(1.0) for delta in step]

    found = asyncio.run(deltas())
    metadata = ResponseMetadata("id", 1, "model")
    streamed, at_once = (
        ChatAnswer(metadata, tokenizer.token_bytes, ResponseOptions()) for _ in range(2)
    )
    chunks = [chunk for delta in found for chunk in streamed.chunks(delta)]
    for delta in found:
        at_once.add(delta)
    assert gathered(chunks) == whole(at_once)

    pieces, wanted = parsed(parse_options, [text], goes_on=finish is FinishReason.LENGTH)
    before = before_a_stop(pieces, stops)
    if before is not None:
        pieces = before
        wanted = "tool_calls" if any(isinstance(p, ToolCallStart) for p in before) else "stop"
    assert joined(piece for delta in found for piece in delta.pieces) == pieces
    assert found[-1].finish == wanted


def before_a_stop(pieces: list[AnswerPiece], stops: tuple[str, ...]) -> list[AnswerPiece] | None:
    """Return the pieces before a stop string of the content; None where there is none."""
    for number, piece in enumerate(pieces):
        if isinstance(piece, TextPiece) and piece.channel is Channel.CONTENT:
            before = before_the_first_stop(piece.text, stops)
            if before is not None:
                return [*pieces[:number], *([replace(piece, text=before)] if before else [])]
    return None
