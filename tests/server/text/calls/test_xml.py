import json
from typing import Any

import pytest

from server.text.calls.xml import XmlCall
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, ToolCallArguments
from tests.server.text.calling import LOOK, call, in_pieces, joined

CUTS = pytest.mark.parametrize("cut", [1, 2, 7, 1000])


def reader(opener: str = "<tool_call>", *tools: Tool) -> XmlCall:
    return XmlCall(0, tools or (LOOK,), opener)


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
        ([], "{}"), ([parameter("at", "a file")], '{"at": "a file"}'),
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
)  # fmt: skip
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


def test_a_tool_without_a_schema_has_arguments_of_any_type() -> None:
    text = "<function=other>\n" + parameter("a", "5") + parameter("b", "x") + "</function>\n!"
    parser = reader("<tool_call>", Tool("other"))
    assert read(parser, text, 1) == (call(0, "other", '{"a": 5, "b": "x"}'), "!")


@pytest.mark.parametrize(
    ("ending", "rest"),
    [
        ("</tool_call>x", "x"), ("text </function>", "text </function>"),
        ("<parameter=>", "<parameter=>"), ("<parameter=a\n>", "<parameter=a\n>"),
        ("</functions>", "</functions>"),
    ],
)  # fmt: skip
@CUTS
def test_whatever_is_no_parameter_ends_the_call(ending: str, rest: str, cut: int) -> None:
    text = "<function=look>\n" + parameter("at", "x") + ending
    assert read(reader(), text, cut) == (call(0, "look", '{"at": "x"}'), rest)


@pytest.mark.parametrize(
    "text",
    [
        "hello", "<func>", '{"name": "look"}', "<function=>", "<function=a<b>", "<function=a\nb>",
        "<function=look> and then", "<function=look>\n<parameter>", "<function=look>\n<parameter=>",
        "<function=look>\n</functions>",
        "<function=other>\n<parameter=at>\nx\n</parameter>\n</function>",
        "<function=name> ... </function></tool_call>",
    ],
)  # fmt: skip
@CUTS
def test_what_is_no_call_is_given_back_whole(text: str, cut: int) -> None:
    parser = reader()
    found, rest = read(parser, text, cut)
    assert (found, rest, parser.started) == ([], text, False)


def test_what_is_no_call_is_given_back_without_the_tag_that_was_known_before() -> None:
    parser = reader("<function=")
    assert parser.feed("a\n") == []
    assert parser.rest == "a\n"


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("A value ends with </parameter> here.", None),
        ("</parameter> at the beginning of a line\n and </parameter>\nat the end of one", None),
        ("Two: </parameter></parameter> and on\n\n", None),
        ("A <parameter=times> within a line", None),
        ("One <parameter=times> and </function> and </tool_call>.", None),
        ("</function>\n</tool_call>\n<tool_call>\nand on", None),
        ("</parameters>\n</param>\n</parameter_list>\n<parameter=>\n<parameter= >\n<func", None),
        ("<function=look>\n</function>\nx", None), ("x\n</function>\n<function=other>\ny", None),
        ("\n\n", None), ("é" * 300 + "\n</para\n", None), ("é" * 300 + "\n</function>\nx", None),
        ("x\n</parameter/>", "x"), ("x\n</parameter=at>", "x"), ("x\n</parameter >\n", "x"),
    ],
)  # fmt: skip
@CUTS
def test_a_value_ends_at_its_tag_on_a_line_of_its_own(
    value: str, right: str | None, cut: int
) -> None:
    ending = "" if right else "\n</parameter>"
    text = looking(f"<parameter=at>\n{value}{ending}\n", parameter("times", "3")) + "more"
    found, rest = read(reader(), text, cut)
    right = value if right is None else right
    assert found == call(0, "look", json.dumps({"at": right, "times": 3}, ensure_ascii=False))
    assert rest == "more"


@pytest.mark.parametrize(
    ("parameters", "right"),
    [
        ("<parameter=at>x y\nz</parameter><parameter=times>3</parameter>", None),
        ("<parameter=at>x y\nz</parameter>\n<parameter=times>3</parameter>\n", None),
        ("<parameter=at>\nx y\nz</parameter>\n<parameter=times>\n3</parameter>", None),
        ("<parameter=at>x y\nz<parameter=times>3</parameter>", None),
        ("<parameter=at>a </parameter> b</parameter>", {"at": "a </parameter> b"}),
        ("<parameter=at>Use <parameter=x> so</parameter>", {"at": "Use <parameter=x> so"}),
        ("  <parameter=at>\n  x\n  </parameter>\n", {"at": "  x\n  "}),
    ],
)  # fmt: skip
@CUTS
def test_a_parameter_may_stand_on_one_line(parameters: str, right: Any, cut: int) -> None:
    found, _ = read(reader(), looking(parameters), cut)
    right = right or {"at": "x y\nz", "times": 3}
    assert found == call(0, "look", json.dumps(right))


@pytest.mark.parametrize(
    ("inside", "right"),
    [
        ("<parameter=at>\nx\n<parameter=times>\n3\n</parameter>\n</function>", None),
        ("<parameter=at>\nx\n  <parameter=times>\n3\n</function>", None),
        ("<parameter=times>\n3\n<parameter=at>\nx\n</function>", {"times": 3, "at": "x"}),
        ("<parameter=at>\nx\n</function>", {"at": "x"}),
        ("<parameter=times>\n3\n</function>", {"times": 3}),
        ("<parameter=at>x</function>", {"at": "x"}), ("<parameter=at>\nx</function>", {"at": "x"}),
        ("<parameter=at>\nx", {"at": "x"}), ("<parameter=at>\nx\n</parameter>", {"at": "x"}),
        ("<parameter=at>\nx</parameter>", {"at": "x"}),
        ("<parameter=at>\nx </function> y\n", {"at": "x </function> y\n"}), ("", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("behind", ["", "\n<tool_call>\n<function=look>"])
@CUTS
def test_a_value_that_is_not_closed_ends_at_the_next_tag(
    inside: str, right: Any, behind: str, cut: int
) -> None:
    text = f"<function=look>\n{inside}\n</tool_call>{behind}"
    parser = reader()
    found = joined(in_pieces(parser.feed, text, cut) + parser.finish(cut=False))
    right = {"at": "x", "times": 3} if right is None else right
    assert found == call(0, "look", json.dumps(right))
    assert parser.complete
    assert parser.rest == behind[: len(parser.rest or "")]


@CUTS
def test_a_value_that_ends_with_the_answer_is_all_that_was_written(cut: int) -> None:
    parser = reader()
    text = "<function=look><parameter=times>3</parameter><parameter=at>\nx\n</para"
    found = joined(in_pieces(parser.feed, text, cut) + parser.finish(cut=False))
    assert found == call(0, "look", '{"times": 3, "at": "x\\n</para"}')
    assert (parser.complete, parser.rest) == (True, "")


LONG = "some text " * 20


@pytest.mark.parametrize("first", ["1", "7", "[1]"])
@pytest.mark.parametrize("cut", [1, 1000])
def test_of_a_parameter_that_comes_twice_the_last_one_counts(first: str, cut: int) -> None:
    text = looking(parameter("times", first), parameter("at", "x"), parameter("times", "2"))
    assert read(reader(), text, cut) == (call(0, "look", '{"times": 2, "at": "x"}'), "")
    text = looking(parameter("at", first), parameter("at", LONG))
    assert read(reader(), text, cut) == (call(0, "look", json.dumps({"at": LONG})), "")


def test_a_long_text_is_sent_as_it_comes_and_other_values_when_the_call_is_complete() -> None:
    parser = reader()
    text = f"<function=look><parameter=times>\n1\n</parameter><parameter=at>\n{LONG}x"
    assert joined(parser.feed(text)) == call(0, "look", f'{{"times": 1, "at": "{LONG}x')
    assert parser.feed("\n</para") == []
    assert parser.feed("ble") == [ToolCallArguments(0, "\\n</parable")]
    assert parser.feed("\n</parameter><parameter=who>a") == [ToolCallArguments(0, '"')]
    assert parser.feed("b</parameter>") == []
    assert parser.feed("</function>") == [ToolCallArguments(0, ', "who": "ab"}')]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=look><parameter=at>", '{"at": "'),
        ("<function=look><parameter=at>\nx\n</para", '{"at": "x\\n</para'),
        ("<function=look><parameter=at>\nx\n</parameter>\n<param", '{"at": "x"'),
        (f"<function=look><parameter=at>\n{LONG}\n", f'{{"at": "{LONG}\\n'),
        ("<function=look><parameter=times>1", '{"times": '),
    ],
)  # fmt: skip
@CUTS
def test_a_call_that_is_cut_off_has_no_more_than_was_said(
    text: str, arguments: str, cut: int
) -> None:
    parser = reader()
    found = joined(in_pieces(parser.feed, text, cut) + parser.finish(cut=True))
    assert found == call(0, "look", arguments)
    assert (parser.complete, parser.rest) == (False, None)


@pytest.mark.parametrize(
    ("opener", "text"),
    [
        ("<tool_call>", ""), ("<tool_call>", " <fun"), ("<tool_call>", "\n<function=look>\n"),
        ("<tool_call>", "\n<function=look>\n</func"), ("<function=", "look>\n<parameter=at"),
        ("<function=", "look></tool_call>"), ("<function=", "loo"),
    ],
)  # fmt: skip
def test_the_beginning_of_a_call_is_none(opener: str, text: str) -> None:
    parser = reader(opener)
    assert parser.feed(text) + parser.finish(cut=False) == []
    assert (parser.started, parser.rest) == (False, text)


def test_an_answer_may_end_behind_a_call() -> None:
    parser = reader()
    parser.feed("<function=look></function>\n</tool")
    assert parser.rest is None
    assert parser.finish(cut=True) == []
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
