import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.calls.hermes import HermesCall, JsonMender, whole_call
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece
from tests.server.text.calling import call, in_pieces, joined

CUTS = pytest.mark.parametrize("cut", [1, 2, 7, 1000])


def reader() -> HermesCall:
    return HermesCall(0, (Tool("f"),))


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '{"a": 1}', ""),
        ('{"name":"f","arguments":{}}</tool_call> more', "{}", " more"),
        ('{ "name" : "f" ,\n"arguments" :\n{ "a":[{}] } } </tool_call>', '{ "a":[{}] }', ""),
        # What looks like an end within a string is none.
        (
            '{"name": "f", "arguments": {"a": "</tool_call>}]\\"}"}}\n</tool_call>',
            '{"a": "</tool_call>}]\\"}"}',
            "",
        ),
        # Line breaks within strings, which JSON wants escaped.
        ('{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>', '{"a": "x\\ny\\t"}', ""),
        # The closing tag, or a bracket, is missing or there once too often.
        ('{"name": "f", "arguments": {"a": 1}} and', '{"a": 1}', "and"),
        ('{"name": "f", "arguments": {"a": 1}\n</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": 1\n</tool_call>x', '{"a": 1\n}', "x"),
        ('{"name": "f", "arguments": {"a": [{"b": 1</tool_call>', '{"a": [{"b": 1}]}', ""),
        # Words that JSON does not have.
        ('{"name": "f", "arguments": {"a": <b>}}</tool_call>', '{"a": "<b>"}', ""),
        ('{"name": "f", "arguments": {"a": [NaN, 1]}}</tool_call>', '{"a": ["NaN", 1]}', ""),
        ('{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', '{"a": "-Infinity"}', ""),
        ('{"name": "f", "arguments": {"a": None, "b": 1}}</tool_call>', '{"a": null, "b": 1}', ""),
        ('{"name": "f", "arguments": {a: .5, b: +3}}</tool_call>', '{"a": 0.5, "b": 3}', ""),
        ('{"name": "f", "arguments": {"a": nan</tool_call>', '{"a": "nan"}', ""),
        ('{"arguments": {"a": NaN}, "name": "f"}</tool_call>', '{"a": "NaN"}', ""),
        ('{"name": "f", "arguments": "{\\"a\\": NaN}"}</tool_call>', '{"a": "NaN"}', ""),
        ('{"name": "f", "arguments": {}}\n<tool_call>', "{}", "<tool_call>"),
        # Another order, or another form.
        ('{"arguments": {"a": "é"}, "name": "f"}</tool_call>x', '{"a": "é"}', "x"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f"}</tool_call>', "{}", ""),
        ('{"name": "f", "arguments": "{}"}</tool_call>', "{}", ""),
        ('{"name": "f", "arguments": {"a": True}}</tool_call>', '{"a": true}', ""),
        ('{"name": "\\u0066", "arguments": null}</tool_call>', "{}", ""),
        # Another name for the arguments.
        ('{"name": "f", "parameters": {"a": 1}}</tool_call>x', '{"a": 1}', "x"),
        ('{"parameters": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}', ""),
        ('\n{"name": "f", "args": {"a": "</x>"}}\n</tool_call>', '{"a": "</x>"}', ""),
        ('{"name": "f", "input": {"a": 1}}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "arguments": null, "input": {"a": 1}}</tool_call>', '{"a": 1}', ""),
        ('{"parameters": "{\\"a\\": 1}", "name": "f"}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "parameters": {}, "arguments": {"a": 1}}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "parameters": {"a": 1}, "arguments": {}}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "arguments": ""}</tool_call>', "{}", ""),
        ('{"id": 7, "name": "f", "arguments": []}</tool_call>', "{}", ""),
        # What else a call has, behind its arguments.
        ('{"name": "f", "arguments": {"a": 1}, "id": "x"}\n</tool_call>y', '{"a": 1}', "y"),
        ('{"name": "f", "arguments": {"a": 1} ,\n "n": [{}]}</tool_call>', '{"a": 1}', ""),
        ('{"name": "f", "arguments": {}, "n": "<"}</tool_call>', "{}", '<"}</tool_call>'),
        ('{"name": "f", "arguments": {"a": 1}}, and', '{"a": 1}', ", and"),
        ('{"name": "f", "arguments": {"a": 1}, and', '{"a": 1}', ", and"),
    ],
)  # fmt: skip
@CUTS
def test_a_call_is_read(text: str, arguments: str, rest: str, cut: int) -> None:
    parser = reader()
    found: list[AnswerPiece] = []
    for start in range(0, len(text), cut):
        found += parser.feed(text[start : start + cut])
        if parser.rest is not None:
            break
    assert joined(found) == call(0, "f", arguments)
    assert (parser.started, parser.complete) == (True, True)
    assert (parser.rest or "") + text[start + cut :] == rest


@pytest.mark.parametrize(
    "text",
    [
        "hello", "\n[1]", '"name"', "{}</tool_call>", '{"name": 5}</tool_call>',
        '{"name": ""}</tool_call>', '{"name": "f", "arguments": [1]}</tool_call>',
        # Arguments that have another name, or none.
        '{"name": "f", "kwargs": {"a": 1}}</tool_call>',
        '{"name": "f", "params": {"a": 1}}</tool_call>',
        '{"a": 1, "name": "f"}</tool_call>',
        '{"type": "function", "name": "f", "a": 1}</tool_call>',
        '{"name": "f", "function": {"arguments": {"a": 1}}}</tool_call>',
        '{"name": "f", "arguments": "x"}</tool_call>', '{"name": "f", "arguments": 5}</tool_call>',
        '{"name": <function-name>, "arguments": {}}</tool_call>',
        '{"name": "a</tool_call>", "arguments": {}}', '{"name": "f", oops}</tool_call> more',
        '{"name": "g", "arguments": {"a": 1}}</tool_call>',
        '{"arguments": {"a": 1}, "name": "g"}</tool_call>',
        '{"name": "f", "input": "a"}</tool_call>', '{"name": "f", "parameters": [1]}</tool_call>',
        '{"name": "\\ud800", "arguments": {}}</tool_call>',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        "[" * 5_000 + "</tool_call>", '{"a":' * 5_000 + "</tool_call>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [1, 1000])
def test_what_is_no_call_is_given_back_whole(text: str, cut: int) -> None:
    parser = reader()
    given = 0
    while parser.rest is None:
        assert parser.feed(text[given : given + cut]) == []
        given += cut
    assert (parser.started, parser.complete) == (False, False)
    assert parser.rest == text[:given]


@CUTS
def test_arguments_are_sent_as_they_come(cut: int) -> None:
    parser = reader()
    assert in_pieces(parser.feed, '{"name": "f", "arguments": {"a": "long te', cut) == call(
        0, "f", '{"a": "long te'
    )


def test_no_more_is_held_back_than_may_be_a_closing_tag() -> None:
    parser = reader()
    parser.feed('{"name": "f", "arguments": {"a": 1')
    assert parser.feed("</tool") == []
    assert joined(parser.feed("s,")) == call(0, "f", '"1</tools"')[1:]


@pytest.mark.parametrize(
    ("text", "arguments", "whole"),
    [
        ('{"name": "f", "arguments": {"a": "x', '{"a": "x', '{"a": "x"}'),
        ('{"name": "f", "arguments": {"a": "x\\u00', '{"a": "x\\u00', '{"a": "x\\\\u00"}'),
        ('{"name": "f", "arguments": {"a": [1, 2', '{"a": [1, 2', '{"a": [1, 2]}'),
        ('{"name": "f", "arguments": {"a": [1, ', '{"a": [1, ', '{"a": [1]}'),
        ('{"name": "f", "arguments": {"a": 1</tool', '{"a": 1</tool', '{"a": 1}'),
        ('{"name": "f", "arguments": {"at"', '{"at"', '{"at":null}'),
        ('{"name": "f", "arguments": {}}\n</tool', "{}", "{}"),
        ('{"arguments": {}, "name": "f"}', "{}", "{}"),
    ],
)
@pytest.mark.parametrize("stops", [False, True])
@CUTS
def test_an_answer_may_end_within_a_call(
    text: str, arguments: str, whole: str, stops: bool, cut: int
) -> None:
    """stops: the model would not go on."""
    parser = reader()
    pieces = in_pieces(parser.feed, text, cut) + parser.finish(cut=not stops)
    assert joined(pieces) == call(0, "f", whole if stops else arguments)
    complete = arguments == "{}"
    assert (parser.complete, parser.rest == "") == (complete, complete)


@pytest.mark.parametrize("text", ["", "\n", '{"name": "f", "arg', '{"name": "f", "arguments": '])
def test_the_beginning_of_a_call_is_none(text: str) -> None:
    parser = reader()
    assert parser.feed(text) + parser.finish(cut=False) == []
    assert (parser.started, parser.rest) == (False, text)


def test_a_whole_call_may_come_in_any_order() -> None:
    assert whole_call('{"arguments": {"a": [1, "é"]}, "name": "f"}') == ("f", '{"a": [1, "é"]}')
    assert whole_call("[]") is None


def test_what_follows_a_call_in_another_order_is_given_back_as_it_is() -> None:
    parser = reader()
    parser.feed('{"arguments": {}, "name": "f"}</tool_call>\n} and on')
    assert parser.rest == "\n} and on"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES)
SLIPS = st.lists(
    st.tuples(
        st.integers(0, 200), st.integers(0, 3), st.text("{}[]:,\"'\\u \nTrue1-.é", max_size=3)
    ),
    max_size=6,
)


def mended(text: str) -> str:
    """The object that a text, or its beginning, is taken for."""
    mender, written = JsonMender(), ""
    for character in text:
        written += mender.feed(character)
        if mender.is_whole:
            return written
    return written + mender.end()


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_what_is_valid_comes_out_as_it_went_in(
    value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert mended(text) == text


@given(OBJECTS, SLIPS)
def test_what_comes_out_is_valid_whatever_goes_in(
    value: dict[str, Any], slips: list[tuple[int, int, str]]
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    for place, cut, more in slips:
        text = text[:place] + more + text[place + cut :]
    assert isinstance(json.loads(mended("{" + text.removeprefix("{"))), dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"at"', {"at": None}),
        ('{"at":', {"at": None}),
        ('{"at", "b": 1}', {"at": None, "b": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": [1, 2, ], "b": 2}', {"a": [1, 2], "b": 2}),
        ('{"a": [1,, 2]}', {"a": [1, 2]}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": ["x" "y" {} []]}', {"a": ["x", "y", {}, []]}),
        ('{"a" 1}', {"a": 1}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1], "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1, {"b": 2}}', {"a": 1, "": {"b": 2}}),
        ("{'a': 'it\\'s \"x\"', 'b': True}", {"a": 'it\'s "x"', "b": True}),
        ('{"a": "it\'s"}', {"a": "it's"}),
        (r'{"a": "\d+\.\w"}', {"a": r"\d+\.\w"}),
        (r'{"a": "C:\users\u00"}', {"a": r"C:\users\u00"}),
        ('{"a": "x\\', {"a": "x\\"}),
        ('{"a": "x\ny\t"', {"a": "x\ny\t"}),
        ("{a: None, b: NaN, c: -.5, d: it's}", {"a": None, "b": "NaN", "c": -0.5, "d": "it's"}),
    ],
)
def test_slips_of_models_are_mended(text: str, value: dict[str, Any]) -> None:
    assert json.loads(mended(text)) == value
