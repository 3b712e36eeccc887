import json
from typing import Any

import pytest

from server.text.calls.xml import XmlCall
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, ToolCallArguments, joined
from tests.server.text.calling import LOOK, call, ids, in_pieces

CUTS = pytest.mark.parametrize("cut", [1, 2, 7, 1000])


def reader(opener: str = "<tool_call>", *tools: Tool) -> XmlCall:
    return XmlCall(0, ids(), tools or (LOOK,), opener)


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def looking(*parameters: str) -> str:
    return "\n<function=look>\n" + "".join(parameters) + "</function>\n</tool_call>"


def read(parser: XmlCall, text: str, cut: int) -> tuple[list[AnswerPiece], str]:
    """What comes of the call, and what follows it."""
    found: list[AnswerPiece] = []
    for start in range(0, len(text), cut):
        found += parser.feed(text[start : start + cut])
        if parser.rest is not None:
            return joined(found), parser.rest + text[start + cut :]
    raise AssertionError("the call goes on")


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ([], "{}"),
        ([parameter("at", "a file")], '{"at": "a file"}'),
        (
            [parameter("at", "x"), parameter("times", "3"), parameter("how", '{"a": [1]}')],
            '{"at": "x", "times": 3, "how": {"a": [1]}}',
        ),
        ([parameter("who", "null")], '{"who": null}'),
        ([parameter("who", "nobody")], '{"who": "nobody"}'),
        ([parameter("times", "often")], '{"times": "often"}'),
        ([parameter("unknown", "5")], '{"unknown": 5}'),
        ([parameter("at", '\n  "x"\\\n<b>é</b>\n')], '{"at": "\\n  \\"x\\"\\\\\\n<b>é</b>\\n"}'),
        ([parameter("at", "</function></tool_call>")], '{"at": "</function></tool_call>"}'),
        (["<parameter=at></parameter>"], '{"at": ""}'),
        (["<parameter=at>\n</parameter>"], '{"at": ""}'),
        (["<parameter=times>5</parameter>"], '{"times": 5}'),
        (["<parameter= at >x</parameter>"], '{"at": "x"}'),
    ],
)
@CUTS
def test_values_become_json_of_the_types_that_the_tool_gives_them(
    parameters: list[str], arguments: str, cut: int
) -> None:
    parser = reader()
    assert read(parser, looking(*parameters) + "more", cut) == (call(0, "look", arguments), "more")
    assert (parser.started, parser.complete) == (True, True)
    json.loads(arguments)


@CUTS
def test_the_outer_tag_may_be_left_out(cut: int) -> None:
    text = looking(parameter("at", "x")).strip().removeprefix("<function=")
    assert read(reader("<function="), text, cut) == (call(0, "look", '{"at": "x"}'), "")


def test_an_unknown_function_has_arguments_of_any_type() -> None:
    text = "<function=other>\n" + parameter("a", "5") + parameter("b", "x") + "</function>\n!"
    assert read(reader(), text, 1) == (call(0, "other", '{"a": 5, "b": "x"}'), "!")


@pytest.mark.parametrize(
    ("ending", "rest"),
    [
        ("</tool_call>x", "x"),
        ("text </function>", "text </function>"),
        ("<parameter=>", "<parameter=>"),
        ("<parameter=a\n>", "<parameter=a\n>"),
        ("</functions>", "</functions>"),
    ],
)
@CUTS
def test_whatever_is_no_parameter_ends_the_call(ending: str, rest: str, cut: int) -> None:
    text = "<function=look>\n" + parameter("at", "x") + ending
    assert read(reader(), text, cut) == (call(0, "look", '{"at": "x"}'), rest)


@pytest.mark.parametrize(
    "text",
    ["hello", "<func>", '{"name": "look"}', "<function=>", "<function=a<b>", "<function=a\nb>"],
)
@CUTS
def test_what_is_no_call_is_given_back_whole(text: str, cut: int) -> None:
    parser = reader()
    found, rest = read(parser, text, cut)
    assert (found, rest, parser.started) == ([], text, False)


def test_what_is_no_call_is_given_back_without_the_tag_that_was_known_before() -> None:
    parser = reader("<function=")
    assert parser.feed("a\n") == []
    assert parser.rest == "a\n"


def test_a_string_is_sent_as_it_comes_and_other_values_when_they_are_whole() -> None:
    parser = reader()
    assert joined(parser.feed("<function=look><parameter=at>\nsome te")) == call(
        0, "look", '{"at": "some te'
    )
    assert parser.feed("\n</para") == []
    assert parser.feed("ble") == [ToolCallArguments(0, "\\n</parable")]
    assert joined(parser.feed("\n</parameter><parameter=times>1")) == [
        ToolCallArguments(0, '", "times": ')
    ]
    assert parser.feed("2") == []
    assert parser.feed("</parameter>") == [ToolCallArguments(0, "12")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=look>", "{"),
        ("<function=look>\n<param", "{"),
        ("<function=look><parameter=at>", '{"at": "'),
        ("<function=look><parameter=at>\nx\n</para", '{"at": "x\\n</para'),
        ("<function=look><parameter=times>1", '{"times": '),
    ],
)
@CUTS
def test_a_call_that_is_cut_off_has_no_more_than_was_said(
    text: str, arguments: str, cut: int
) -> None:
    parser = reader()
    assert joined(in_pieces(parser.feed, text, cut) + parser.flush()) == call(0, "look", arguments)
    assert (parser.complete, parser.rest) == (False, None)


@pytest.mark.parametrize(
    ("opener", "text"), [("<tool_call>", ""), ("<tool_call>", " <fun"), ("<function=", "loo")]
)
def test_the_beginning_of_a_call_is_none(opener: str, text: str) -> None:
    parser = reader(opener)
    assert parser.feed(text) + parser.flush() == []
    assert (parser.started, parser.rest) == (False, text)


def test_an_answer_may_end_behind_a_call() -> None:
    parser = reader()
    parser.feed("<function=look></function>\n</tool")
    assert parser.rest is None
    assert parser.flush() == []
    assert parser.complete
    assert parser.rest == ""


def test_a_reference_of_the_schema_is_followed() -> None:
    schema: dict[str, Any] = {
        "$defs": {"name": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/name"}},
    }
    text = "<function=f>" + parameter("a", "5") + "</function>!"
    found, _ = read(reader("<tool_call>", Tool("f", parameters=schema)), text, 1000)
    assert found == call(0, "f", '{"a": "5"}')
