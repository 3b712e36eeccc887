import json

import pytest

from server.text.calls import CallParser, new_call_id
from server.text.pieces import AnswerPiece, joined
from server.text.tool_format import ToolFormat
from tests.server.text.calling import LOOK, call, ids, in_pieces, said

HERMES, XML = ToolFormat.HERMES, ToolFormat.XML
CUTS = pytest.mark.parametrize("cut", [1, 2, 7, 1000])


def parser(form: ToolFormat = HERMES, max_calls: int | None = None) -> CallParser:
    return CallParser((LOOK,), form, max_calls, ids())


def hermes(name: str = "look", **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str = "look", **arguments: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


AT_X = '{"at": "x"}'


@pytest.mark.parametrize("form", [HERMES, XML])
@CUTS
def test_calls_are_found_between_texts(form: ToolFormat, cut: int) -> None:
    one, two = (hermes(at="x"), hermes("f")) if form is HERMES else (xml(at="x"), xml("f"))
    read = parser(form)
    text = f"Let me see.\n{one}\n{two}\n\nDone.\n"
    assert joined(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("Let me see."),
        *call(0, "look", AT_X),
        *call(1, "f", "{}"),
        said("Done.\n"),
    ]
    assert read.calls == 2
    assert read.ended_with_calls
    assert not read.done


@pytest.mark.parametrize(
    ("before", "content"),
    [
        ("", ""),
        ("\n\n", ""),
        ("a", "a"),
        ("a\n", "a"),
        ("a\n\n", "a\n"),
        ("\n\na \n", "\n\na "),
    ],
)
@CUTS
def test_one_line_break_before_a_call_belongs_to_it(before: str, content: str, cut: int) -> None:
    read = parser()
    found = joined(in_pieces(read.feed, before + hermes(at="x"), cut) + read.flush())
    assert found == ([said(content)] if content else []) + call(0, "look", AT_X)


@pytest.mark.parametrize("text", ["", " ", "\n\n", "a", "a\n", "\na\n\n", "<tool", "a\n<tool_call"])
@CUTS
def test_an_answer_without_calls_is_as_it_was_said(text: str, cut: int) -> None:
    read = parser()
    found = joined(in_pieces(read.feed, text, cut) + read.flush())
    assert found == ([said(text)] if text else [])
    assert not read.ended_with_calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a\n\n<tool_call>\nhuh</tool_call>\nb",
        "\n<tool_call>{</tool_call>",
        'a <tool_call>\n{"name": "look", "arg',
        "<tool_call><tool_call>",
    ],
)
@CUTS
def test_what_turns_out_to_be_no_call_stays_content(text: str, cut: int) -> None:
    read = parser()
    assert joined(in_pieces(read.feed, text, cut) + read.flush()) == [said(text)]
    assert (read.calls, read.ended_with_calls) == (0, False)


@CUTS
def test_a_call_may_follow_what_is_none(cut: int) -> None:
    read = parser()
    text = f"<tool_call>\nno {hermes(at='x')} <tool_call>no"
    assert joined(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("<tool_call>\nno "),
        *call(0, "look", AT_X),
        said("<tool_call>no"),
    ]


@CUTS
def test_a_function_without_its_outer_tag_is_a_call(cut: int) -> None:
    read = parser(XML)
    text = "a\n" + xml(at="x").removeprefix("<tool_call>\n") + " <function>"
    assert joined(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("a"),
        *call(0, "look", AT_X),
        said("<function>"),
    ]


def test_the_other_format_is_content() -> None:
    read = parser(HERMES)
    assert joined(read.feed(xml(at="x")) + read.flush()) == [said(xml(at="x"))]
    read = parser(XML)
    assert joined(read.feed(hermes(at="x")) + read.flush()) == [said(hermes(at="x"))]


@pytest.mark.parametrize("form", [HERMES, XML])
@CUTS
def test_nothing_is_read_behind_as_many_calls_as_are_allowed(form: ToolFormat, cut: int) -> None:
    one = hermes(at="x") if form is HERMES else xml(at="x")
    read = parser(form, max_calls=1)
    text = f"a\n{one}\n{one} and more"
    assert joined(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("a"),
        *call(0, "look", AT_X),
    ]
    assert (read.calls, read.done, read.ended_with_calls) == (1, True, True)


def test_the_last_call_allowed_ends_with_its_arguments() -> None:
    read = parser(max_calls=1)
    read.feed(hermes(at="x").removesuffix("}\n</tool_call>")[:-1])
    assert not read.done
    read.feed("}")
    assert read.done


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (hermes(at="x"), True),
        (hermes(at="x")[:-5], True),
        (hermes(at="x")[:-20], False),
        (hermes(at="x") + hermes(at="y")[:-20], False),
        (hermes(at="x") + " more", True),
        (hermes(at="x") + "<tool_call>", True),
    ],
)
def test_an_answer_ends_with_calls_when_the_last_one_is_complete(text: str, ended: bool) -> None:
    read = parser()
    read.feed(text)
    read.flush()
    assert read.ended_with_calls is ended


def test_what_is_certain_is_not_held_back() -> None:
    read = parser()
    assert read.feed("\n") == []
    assert read.feed("a\n\n") == [said("\na\n")]
    assert read.feed("<to") == []
    assert read.feed("e") == [said("\n<toe")]
    found: list[AnswerPiece] = read.feed('<tool_call>{"name": "look", "arguments": {"at')
    assert joined(found) == call(0, "look", '{"at')


def test_no_two_calls_have_the_same_id() -> None:
    made = {new_call_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(each.startswith("call_") for each in made)
