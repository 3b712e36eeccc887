import json

import pytest

from server.text.calls.parser import CallParser, ends_in_call, new_call_id
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import WrittenCall
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, TextPiece, ToolCallArguments, ToolCallStart, join_pieces
from tests.server.text.calling import LOOK, call, ids, in_pieces, said

HERMES, XML = ToolFormat.HERMES, ToolFormat.XML
TOOLS = (LOOK, Tool("f"))
CUTS = pytest.mark.parametrize("cut", [1, 2, 7, 1000])


def parser(form: ToolFormat = HERMES, max_calls: int | None = None) -> CallParser:
    return CallParser(TOOLS, form, max_calls, ids())


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
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [
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
        ("", ""), ("\n\n", ""), ("a", "a"), ("a\n", "a"), ("a\n\n", "a\n"), ("\n\na \n", "\n\na "),
    ],
)  # fmt: skip
@CUTS
def test_one_line_break_before_a_call_belongs_to_it(before: str, content: str, cut: int) -> None:
    read = parser()
    found = join_pieces(in_pieces(read.feed, before + hermes(at="x"), cut) + read.flush())
    assert found == ([said(content)] if content else []) + call(0, "look", AT_X)


@pytest.mark.parametrize("text", ["", " ", "\n\n", "a", "a\n", "\na\n\n", "<tool", "a\n<tool_call"])
@CUTS
def test_an_answer_without_calls_is_as_it_was_said(text: str, cut: int) -> None:
    read = parser()
    found = join_pieces(in_pieces(read.feed, text, cut) + read.flush())
    assert found == ([said(text)] if text else [])
    assert not read.ended_with_calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>", "a\n\n<tool_call>\nhuh</tool_call>\nb", "\n<tool_call>{</tool_call>",
        'a <tool_call>\n{"name": "look", "arg', "<tool_call><tool_call>",
    ],
)  # fmt: skip
@CUTS
def test_what_turns_out_to_be_no_call_stays_content(text: str, cut: int) -> None:
    read = parser()
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [said(text)]
    assert (read.calls, read.ended_with_calls) == (0, False)


@CUTS
def test_a_call_may_follow_what_is_none(cut: int) -> None:
    read = parser()
    text = f"<tool_call>\nno {hermes(at='x')} <tool_call>no"
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("<tool_call>\nno "),
        *call(0, "look", AT_X),
        said("<tool_call>no"),
    ]


@CUTS
def test_a_function_without_its_outer_tag_is_a_call(cut: int) -> None:
    read = parser(XML)
    text = "a\n" + xml(at="x").removeprefix("<tool_call>\n") + " <function>"
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [
        said("a"),
        *call(0, "look", AT_X),
        said("<function>"),
    ]


PROSE = [
    "One writes <function=look> and then its parameters.",
    "Write `<function=look>` first.",
    "The macro <function=foo> is another one.",
    "The form is <tool_call><function=name> ... </function></tool_call>.",
    "Use `<tool_call>` tags, or <tool_call><function=look> with them.",
    "Search for '<function=' in the file.",
    "So: <function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n",
    "a\n<function=look> begins a line",
    "<function=foo>\n<parameter=at>\nx\n</parameter>\n</function>",
    "a\n<tool_call>\n<function=foo>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=look>",
]


@pytest.mark.parametrize("text", PROSE)
@CUTS
def test_prose_that_names_the_tags_is_content(text: str, cut: int) -> None:
    read = parser(XML)
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [said(text)]
    assert (read.calls, read.ended_with_calls) == (0, False)


@pytest.mark.parametrize("begun", ["", "Well.\n"])
@CUTS
def test_a_call_may_begin_where_an_answer_or_a_line_does(begun: str, cut: int) -> None:
    read = CallParser(TOOLS, XML, None, ids(), begun_content=begun)
    text = OPEN_MISSING * 2 + "\nand on\n" + OPEN_MISSING
    found = join_pieces(in_pieces(read.feed, text, cut) + read.flush())
    assert [p.text for p in found if isinstance(p, TextPiece)] == ["and on"]
    assert read.calls == 3


def test_a_call_does_not_begin_behind_a_begun_line() -> None:
    read = CallParser(TOOLS, XML, None, ids(), begun_content="Well: ")
    assert join_pieces(read.feed(OPEN_MISSING) + read.flush()) == [said(OPEN_MISSING)]


def test_the_other_format_is_content() -> None:
    read = parser(HERMES)
    assert join_pieces(read.feed(xml(at="x")) + read.flush()) == [said(xml(at="x"))]
    read = parser(XML)
    assert join_pieces(read.feed(hermes(at="x")) + read.flush()) == [said(hermes(at="x"))]


@pytest.mark.parametrize("form", [HERMES, XML])
@CUTS
def test_nothing_is_read_behind_as_many_calls_as_are_allowed(form: ToolFormat, cut: int) -> None:
    one = hermes(at="x") if form is HERMES else xml(at="x")
    read = parser(form, max_calls=1)
    text = f"a\n{one}\n{one} and more"
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [
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
        (hermes(at="x"), True), (hermes(at="x")[:-5], True), (hermes(at="x")[:-20], False),
        (hermes(at="x") + hermes(at="y")[:-20], False), (hermes(at="x") + " more", True),
        (hermes(at="x") + "<tool_call>", True),
    ],
)  # fmt: skip
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
    assert join_pieces(found) == call(0, "look", '{"at')


def test_no_two_calls_have_the_same_id() -> None:
    made = {new_call_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(each.startswith("call_") for each in made)


# --- Llama's calls -----------------------------------------------------------------------------

LLAMA_CALL = '{"name": "look", "parameters": {"at": "x"}}'


@pytest.mark.parametrize(
    "text",
    [
        LLAMA_CALL, f"<|python_tag|>{LLAMA_CALL}", f"\n\n<|python_tag|>\n{LLAMA_CALL}\n",
        f"{LLAMA_CALL}}}", f"{LLAMA_CALL[:-1]}", f"{LLAMA_CALL};",
        '{"type": "function", "name": "look", "parameters": {"at": "x"}}',
        '{"name": "look", "arguments": {"at": "x"}}', '{"parameters": {"at": "x"}, "name": "look"}',
        '{"name": "look", "parameters": "{\\"at\\": \\"x\\"}"}',
    ],
)  # fmt: skip
@CUTS
def test_json_that_is_all_of_the_answer_is_a_call_of_llamas(text: str, cut: int) -> None:
    read = parser(ToolFormat.LLAMA)
    found = join_pieces(in_pieces(read.feed, text, cut) + read.flush())
    assert found == call(0, "look", AT_X)
    assert read.ended_with_calls


@CUTS
def test_calls_of_llamas_may_follow_each_other(cut: int) -> None:
    read = parser(ToolFormat.LLAMA)
    text = f'{LLAMA_CALL}; {{"name": "f", "parameters": {{"a": ";"}}}}\nDone. {LLAMA_CALL}'
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [
        *call(0, "look", AT_X),
        *call(1, "f", '{"a": ";"}'),
        said(f"Done. {LLAMA_CALL}"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"So: {LLAMA_CALL}", f"So:\n{LLAMA_CALL}", LLAMA_CALL.replace("look", "other"),
        '{"name": "other"}', '{"name": "look", "parameters": [1]}', '{"name": "look", "par',
        '{"title": "look", "parameters": {}} {', "{}", "\n{ 1", '<|python_tag|>print("x")',
        "<|python_tag|>", "<|python",
    ],
)  # fmt: skip
@CUTS
def test_what_is_no_call_of_llamas_is_content(text: str, cut: int) -> None:
    read = parser(ToolFormat.LLAMA)
    assert join_pieces(in_pieces(read.feed, text, cut) + read.flush()) == [said(text)]
    assert not read.ended_with_calls


def test_other_json_of_llamas_does_not_wait_for_its_end() -> None:
    for text in ('{"title": "a', '{"name": "a", "age', "{ 1", "Well"):
        assert join_pieces(parser(ToolFormat.LLAMA).feed(text)) == [said(text)]


def test_no_call_of_llamas_begins_behind_what_was_begun() -> None:
    read = CallParser(TOOLS, ToolFormat.LLAMA, None, ids(), begun_content="So:\n")
    assert join_pieces(read.feed(LLAMA_CALL)) == [said(LLAMA_CALL)]
    assert ends_in_call(LLAMA_CALL[:9], TOOLS, ToolFormat.LLAMA)
    assert not ends_in_call("So: {", TOOLS, ToolFormat.LLAMA)


# --- what is remembered ------------------------------------------------------------------------


def remembered(text: str, form: ToolFormat, max_calls: int | None, cut: int) -> list[WrittenCall]:
    calls: list[WrittenCall] = []
    read = CallParser(TOOLS, form, max_calls, ids(), calls.append)
    pieces = join_pieces(in_pieces(read.feed, text, cut) + read.flush())
    for written in calls:
        name = next(p.name for p in pieces if isinstance(p, ToolCallStart) and p.id == written.id)
        index = int(written.id.removeprefix("call_"))
        told = "".join(
            p.text for p in pieces if isinstance(p, ToolCallArguments) and p.index == index
        )
        assert (written.name, written.arguments) == (name, told)
    return calls


COMPACT = '<tool_call> {"name":"look","arguments":{"at":"x"}}</tool_call>'
ANOTHER_ORDER = '<tool_call>{"arguments": {"at": "x"}, "name": "look"}</tool_call>'
BRACKET_MISSING = '<tool_call>{"name": "look", "arguments": {"at": "x"}\n</tool_call>'
OPEN_MISSING = xml(at="x").removeprefix("<tool_call>\n")


@pytest.mark.parametrize(
    ("form", "call_text"),
    [
        (HERMES, hermes(at="x")), (HERMES, COMPACT), (HERMES, ANOTHER_ORDER),
        (HERMES, BRACKET_MISSING), (XML, xml(at="x", how="{}")), (XML, OPEN_MISSING),
    ],
)  # fmt: skip
@CUTS
def test_calls_are_remembered_as_they_were_written(
    form: ToolFormat, call_text: str, cut: int
) -> None:
    calls = remembered(f"Well.\n{call_text}\n{call_text}Done.", form, None, cut)
    assert [call.text for call in calls] == [call_text, call_text]


@pytest.mark.parametrize(
    ("form", "call_text", "kept"),
    [
        (HERMES, hermes(at="x"), hermes(at="x")), (HERMES, ANOTHER_ORDER, ANOTHER_ORDER),
        (HERMES, BRACKET_MISSING, BRACKET_MISSING.replace("}", "}}")),
        (HERMES, COMPACT, COMPACT.removesuffix("}</tool_call>") + "}\n</tool_call>"),
        (XML, xml(at="x"), xml(at="x")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_the_only_call_ends_as_calls_end(
    form: ToolFormat, call_text: str, kept: str, cut: int
) -> None:
    (call,) = remembered(call_text * 2, form, 1, cut)
    assert call.text in (call_text, kept), "as far as it was read before the answer was cut"


@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, hermes(at="x")[:-20]),
        (HERMES, "<tool_call>no</tool_call>"),
        (XML, xml(at="x")[:-30]),
        (XML, "<tool_call><function=look>and so on</tool_call>"),
        (XML, "<tool_call><function=look><parameter=at>\nx\n</parameter>\nand so on"),
    ],
)
def test_what_is_not_written_as_calls_are_is_not_remembered(
    form: ToolFormat, text: str, max_calls: int | None
) -> None:
    assert remembered(text, form, max_calls, 3) == []


def test_a_call_that_lacks_its_closing_tag_is_not_remembered() -> None:
    assert remembered(LLAMA_CALL, ToolFormat.LLAMA, 1, 3) == []
    text = '<tool_call>{"name": "look", "arguments": {}}'
    assert remembered(text, HERMES, None, 3) == []
    assert remembered(f"{text} and so on", HERMES, None, 3) == []
