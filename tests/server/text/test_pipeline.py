"""The pipeline at its door: tokens go in, deltas come out."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.types import (
    FinishReason,
    SamplingParams,
    TokenEvent,
)
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import WrittenCall
from server.text.conversation import Channel, Tool, first_channel_of
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from server.text.pipeline import (
    GenerationError,
    ParseOptions,
    TextPipeline,
    decoded_text,
    ends_in_call,
)
from server.text.tokenizer import EncodedText, Tokenizer
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.harness import decoded, ids_of, token_id
from tests.server.streams import fault, token
from tests.server.text.calling import (
    LOOK,
    PARAMS,
    call,
    cut,
    deltas_of,
    joined,
    pieces_of,
    said,
    thought,
)

HERMES, XML, LLAMA = ToolFormat.HERMES, ToolFormat.XML, ToolFormat.LLAMA
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PLAIN = "<|im_start|>assistant\n"
OPENED = PLAIN + "<think>\n"
CLOSED = OPENED + "\n</think>\n\n"
MANY = 20_000
CUTS = pytest.mark.parametrize("size", [1, 2, 7, 1000])


# --- characters ------------------------------------------------------------------------------


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The new text of each token, and what comes with the end."""
    pipeline = TextPipeline(tokenizer, SamplingParams(MANY + 1))
    deltas = [pipeline.feed([token(number)]) for number in ids] + [pipeline.finish()]
    return ["".join(p.text for p in d.pieces if isinstance(p, TextPiece)) for d in deltas]


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    (found,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])]
    return found


def test_a_character_comes_out_when_its_last_byte_is_there(tokenizer: Tokenizer) -> None:
    found = texts_of(tokenizer, ids_of(tokenizer, "é😀!"))
    assert found == ["", "é", "", "", "", "😀", "!", ""]


def test_special_tokens_are_no_text_and_other_added_tokens_are(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "<|im_start|><think>a</think><|im_end|>")
    assert len(ids) == 5
    assert "".join(texts_of(tokenizer, [*ids, tokenizer.vocab_size + 7])) == "<think>a</think>"


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (None, [said("a{}b")]),
        (ParseOptions(PLAIN), [thought("a"), said("<tool_call>{}</tool_call>b")]),
    ],
)
def test_tags_that_are_special_are_text_where_they_are_read(
    tmp_path: Path, options: ParseOptions | None, pieces: list[AnswerPiece]
) -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    write_tokenizer(tmp_path, 1000, special=(*SPECIAL_TOKENS, *tags), plain=())
    strict = Tokenizer(tmp_path)
    ids = ids_of(strict, "<think>a</think><tool_call>{}</tool_call>b<|im_end|>")
    assert TextPipeline(strict, PARAMS, (), options).feed([*map(token, ids)]).pieces == pieces


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ("a b", [0, 1, 2]),
        ("é!", [0, 0, 1]),
        ("a😀b", [0, 1, 1, 1, 1, 2]),
        # What never becomes a character is replaced by one, and counts from where it began.
        (b"\xc3!", [0, 1]),
        (b"\xc3\xc3\xa9!", [0, 1, 1, 2]),
        (b"\xe0\x80!", [0, 1, 2]),
        (b"\xf0\x9f", [0, 0]),
    ],
)
def test_a_token_begins_in_the_character_that_its_first_byte_belongs_to(
    tokenizer: Tokenizer, tokens: str | bytes, offsets: list[int]
) -> None:
    raw = tokens.encode() if isinstance(tokens, str) else tokens
    events = [token(byte_token(tokenizer, byte), None, -1.0) for byte in raw]
    delta = TextPipeline(tokenizer, PARAMS, ("é STOP",)).feed(events)
    assert [report.offset for report in delta.tokens] == offsets


def test_all_tokens_of_a_prompt_are_text(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "<|im_start|>é<think>😀")[:-1], tokenizer.vocab_size + 7]
    assert decoded_text(tokenizer, ids) == EncodedText(
        "<|im_start|>é<think>\N{REPLACEMENT CHARACTER}",
        tuple(ids),
        (0, 12, 12, 13, 20, 20, 20, 20),
    )
    assert decoded_text(tokenizer, []) == EncodedText("", (), ())


@pytest.mark.parametrize("text", ["é", "<|im_start|>", "w500"])
def test_a_token_costs_the_same_however_many_came_before(tokenizer: Tokenizer, text: str) -> None:
    # The first byte of é, again and again, never becomes a character.
    ids = ids_of(tokenizer, text)[:1] * MANY
    started = time.perf_counter()
    found = texts_of(tokenizer, ids)
    # A detokenizer that decodes what is incomplete over and over takes half a minute.
    assert time.perf_counter() - started < 5.0
    assert "".join(found) == decoded(tokenizer, ids)


# --- reasoning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "pieces"),
    [
        (PLAIN, "Hello.", [said("Hello.")]),
        (PLAIN, "<think>\nHm.\n</think>\n\nHello.", [thought("Hm."), said("Hello.")]),
        (PLAIN, "\n<think>Hm.</think>Hello.\n", [thought("Hm."), said("Hello.\n")]),
        (PLAIN, "<think>\n\n</think>\n\nHello.", [said("Hello.")]),
        (PLAIN, "<think>Hm. And then", [thought("Hm. And then")]),
        (PLAIN, "<think>Hm.\n</thi", [thought("Hm.\n</thi")]),
        (PLAIN, "<thin ice", [said("<thin ice")]),
        (PLAIN, "<thi", [said("<thi")]),
        (PLAIN, "  spaced", [said("  spaced")]),
        (PLAIN, "Hello <think>no</think>", [said("Hello <think>no</think>")]),
        (PLAIN, "<think>a < b</think>c", [thought("a < b"), said("c")]),
        (PLAIN, "<think>a</think>b</think>c", [thought("a"), said("b</think>c")]),
        (OPENED, "Hm.\n</think>\n\nHello.", [thought("Hm."), said("Hello.")]),
        (OPENED, "Hm.", [thought("Hm.")]),
        (CLOSED, "\nHello.", [said("\nHello.")]),
        (CLOSED, "<think>Hm.</think>", [said("<think>Hm.</think>")]),
        (PLAIN, "", []),
        (PLAIN, "<think>", []),
        (OPENED, " \n", []),
    ],
)
@CUTS
def test_thoughts_are_split_off_the_beginning(
    prompt: str, text: str, pieces: list[AnswerPiece], size: int
) -> None:
    deltas = deltas_of(cut(text, size), ParseOptions(prompt))
    assert (pieces_of(deltas), deltas[-1].finish) == (pieces, "stop")


@pytest.mark.parametrize(
    ("prompt", "channel"),
    [
        (PLAIN, None),
        ("", None),
        (OPENED, Channel.REASONING),
        (OPENED.strip(), Channel.REASONING),
        (CLOSED, Channel.CONTENT),
    ],
)
def test_a_prompt_tells_whether_the_model_is_thinking_already(
    prompt: str, channel: Channel | None
) -> None:
    assert first_channel_of(prompt) is channel


def test_text_is_not_held_back_once_its_part_is_certain() -> None:
    parts = ["<think>One", " two ", "three</th", "ink>\nA", " b "]
    wanted = [[thought("One")], [thought(" two")], [thought(" three")], [said("A")], [said(" b ")]]
    assert [delta.pieces for delta in deltas_of(parts, ParseOptions(PLAIN))] == [*wanted, []]


# --- calls -----------------------------------------------------------------------------------

TOOLS = (LOOK, Tool("f"))
AT_X = '{"at": "x"}'


def hermes(name: str = "look", **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(name: str = "look", **arguments: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


LLAMA_CALL = '{"name": "look", "parameters": {"at": "x"}}'
OPEN_MISSING = xml(at="x").removeprefix("<tool_call>\n")


def options(
    form: ToolFormat = HERMES,
    max_calls: int | None = None,
    *,
    begun: str = "",
    prompt: str = CLOSED,
) -> ParseOptions:
    return ParseOptions(prompt, TOOLS, form, max_calls, begun=begun)


def read(
    text: str, how: ParseOptions | None = None, size: int = 1, finish: FinishReason = STOP
) -> tuple[list[AnswerPiece], str | None]:
    """The pieces of an answer, and why it ended."""
    deltas = deltas_of(cut(text, size), how or options(), finish=finish)
    return pieces_of(deltas), deltas[-1].finish


@pytest.mark.parametrize("form", [HERMES, XML])
@CUTS
def test_calls_are_found_between_texts(form: ToolFormat, size: int) -> None:
    one, two = (hermes(at="x"), hermes("f")) if form is HERMES else (xml(at="x"), xml("f"))
    text = f"Let me see.\n{one}\n{two}\n\nDone.\n"
    calls = [*call(0, "look", AT_X), *call(1, "f", "{}")]
    wanted = [said("Let me see."), *calls, said("Done.\n")]
    assert read(text, options(form), size) == (wanted, "tool_calls")


@pytest.mark.parametrize(
    ("before", "content"),
    [
        ("", ""), ("\n\n", ""), ("a", "a"), ("a\n", "a"), ("a\n\n", "a\n"), ("\n\na \n", "\n\na "),
    ],
)  # fmt: skip
@CUTS
def test_one_line_break_before_a_call_belongs_to_it(before: str, content: str, size: int) -> None:
    found, _ = read(before + hermes(at="x"), size=size)
    assert found == ([said(content)] if content else []) + call(0, "look", AT_X)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *[(HERMES, text) for text in ("", " ", "\n\n", "a\n", "\na\n\n", "<tool", "a\n<tool_call")],
        *[(HERMES, text) for text in ("<tool_call>", "\n<tool_call>{</tool_call>")],
        (HERMES, "a\n\n<tool_call>\nhuh</tool_call>\nb"),
        (HERMES, 'a <tool_call>\n{"name": "look", "arg'),
        (HERMES, "<tool_call><tool_call>"),
        (HERMES, xml(at="x")),
        (XML, hermes(at="x")),
        (XML, "One writes <function=look> and then its parameters."),
        (XML, "Write `<function=look>` first."),
        (XML, "The macro <function=foo> is another one."),
        (XML, "The form is <tool_call><function=name> ... </function></tool_call>."),
        (XML, "Use `<tool_call>` tags, or <tool_call><function=look> with them."),
        (XML, "Search for '<function=' in the file."),
        (XML, "So: <function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n"),
        (XML, "a\n<function=look> begins a line"),
        (XML, "<function=foo>\n<parameter=at>\nx\n</parameter>\n</function>"),
        (XML, f"a\n{xml('foo', at='x')}"),
        (XML, "<tool_call>\n<function=look>"),
        (LLAMA, f"So: {LLAMA_CALL}"),
        (LLAMA, f"So:\n{LLAMA_CALL}"),
        (LLAMA, LLAMA_CALL.replace("look", "other")),
        *[(LLAMA, text) for text in ('{"name": "other"}', '{"name": "look", "par', "{}", "\n{ 1")],
        (LLAMA, '{"name": "look", "parameters": [1]}'),
        (LLAMA, '{"title": "look", "parameters": {}} {'),
        *[(LLAMA, text) for text in ('<|python_tag|>print("x")', "<|python_tag|>", "<|python")],
    ],
)
@CUTS
def test_what_is_no_call_is_content_as_it_was_said(form: ToolFormat, text: str, size: int) -> None:
    assert read(text, options(form), size) == ([said(text)] if text else [], "stop")


@CUTS
def test_a_call_may_follow_what_is_none(size: int) -> None:
    text = f"<tool_call>\nno {hermes(at='x')} <tool_call>no"
    calls = call(0, "look", AT_X)
    found = read(text, size=size)
    assert found == ([said("<tool_call>\nno "), *calls, said("<tool_call>no")], "tool_calls")
    found = read(f"a\n{OPEN_MISSING} <function>", options(XML), size)
    assert found == ([said("a"), *calls, said("<function>")], "tool_calls")


@pytest.mark.parametrize("begun", ["", "Well.\n"])
@CUTS
def test_a_call_may_begin_where_an_answer_or_a_line_does(begun: str, size: int) -> None:
    text = OPEN_MISSING * 2 + "\nand on\n" + OPEN_MISSING
    found, _ = read(text, options(XML, begun=begun), size)
    calls = [piece for number in range(3) for piece in call(number, "look", AT_X)]
    assert found == [*calls[:4], said("and on"), *calls[4:]]


def test_a_call_does_not_begin_behind_a_begun_line() -> None:
    assert read(OPEN_MISSING, options(XML, begun="Well: "))[0] == [said(OPEN_MISSING)]
    assert read(LLAMA_CALL, options(LLAMA, begun="So:\n"))[0] == [said(LLAMA_CALL)]


@pytest.mark.parametrize("form", [HERMES, XML])
@pytest.mark.parametrize("finish", [STOP, LENGTH])
@CUTS
def test_nothing_is_read_behind_as_many_calls_as_are_allowed(
    form: ToolFormat, finish: FinishReason, size: int
) -> None:
    one = hermes(at="x") if form is HERMES else xml(at="x")
    found = read(f"a\n{one}\n{one} and more", options(form, 1), size, finish)
    assert found == ([said("a"), *call(0, "look", AT_X)], "tool_calls")


@pytest.mark.parametrize(
    ("text", "finish"),
    [
        (hermes(at="x"), "tool_calls"), (hermes(at="x")[:-5], "tool_calls"),
        (hermes(at="x")[:-20], "stop"), (hermes(at="x") + hermes(at="y")[:-20], "stop"),
        (hermes(at="x") + " more", "tool_calls"), (hermes(at="x") + "<tool_call>", "tool_calls"),
    ],
)  # fmt: skip
def test_an_answer_ends_with_calls_when_the_last_one_is_complete(text: str, finish: str) -> None:
    assert read(text)[1] == finish
    assert read(text, finish=LENGTH)[1] == "length"


def test_what_is_certain_is_not_held_back() -> None:
    parts = ["\n", "a\n\n", "<to", "e", '<tool_call>{"name": "look", "arguments": {"at']
    *found, begun, _ = [delta.pieces for delta in deltas_of(parts, options())]
    assert found == [[], [said("\na\n")], [], [said("\n<toe")]]
    assert joined(begun) == call(0, "look", '{"at')
    for text in ('{"title": "a', '{"name": "a", "age', "{ 1", "Well"):
        assert deltas_of([text], options(LLAMA))[0].pieces == [said(text)]


@CUTS
def test_no_two_calls_have_the_same_id(size: int) -> None:
    deltas = deltas_of(cut(hermes() * 100, size), options())
    ids = [p.id for d in deltas for p in d.pieces if isinstance(p, ToolCallStart)]
    assert len(set(ids)) == 100
    assert all(each.startswith("call_") for each in ids)


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
def test_json_that_is_all_of_the_answer_is_a_call_of_llamas(text: str, size: int) -> None:
    assert read(text, options(LLAMA), size) == (call(0, "look", AT_X), "tool_calls")


@CUTS
def test_calls_of_llamas_may_follow_each_other(size: int) -> None:
    text = f'{LLAMA_CALL}; {{"name": "f", "parameters": {{"a": ";"}}}}\nDone. {LLAMA_CALL}'
    calls = [*call(0, "look", AT_X), *call(1, "f", '{"a": ";"}')]
    assert read(text, options(LLAMA), size)[0] == [*calls, said(f"Done. {LLAMA_CALL}")]


def test_a_text_may_end_within_a_call() -> None:
    assert ends_in_call(LLAMA_CALL[:9], TOOLS, LLAMA)
    assert not ends_in_call("So: {", TOOLS, LLAMA)
    assert ends_in_call(hermes() + hermes()[:-5], TOOLS, HERMES)
    assert not ends_in_call(hermes(), TOOLS, HERMES)


@pytest.mark.parametrize("form", [HERMES, XML])
@pytest.mark.parametrize(
    ("text", "thoughts", "calls"),
    [
        ("I read it.\n{call}", "I read it.", 1), ("{call}\n", "", 1),
        ("Hm.\n\n{call}\n{call}\n\n", "Hm.", 2), ("Hm.\n{call}\n</think>\n\n", "Hm.", 1),
        ("Perhaps\n{call}\nbut\n<tool_call>no\n{call}", "Perhaps\n{call}\nbut\n<tool_call>no", 1),
        ("A <tool_call> is a tag.\n{call}", "A <tool_call> is a tag.", 1),
        ("Hm.\n{call}\nNo.", "Hm.\n{call}\nNo.", 0),
        ("Hm.\n{call}\nNo.\n</think>\n", "Hm.\n{call}\nNo.", 0),
        ("A <tool_call> is a tag", "A <tool_call> is a tag", 0),
        ("Hm.\n{call}\n<tool_call>\n", "Hm.\n{call}\n<tool_call>", 0),
        ("Hm. <tool_c", "Hm. <tool_c", 0),
    ],
)  # fmt: skip
@CUTS
def test_a_whole_call_at_the_end_of_thoughts_is_made(
    form: ToolFormat, text: str, thoughts: str, calls: int, size: int
) -> None:
    call_text = hermes(at="x") if form is HERMES else OPEN_MISSING.removesuffix("\n</tool_call>")
    text, thoughts = (each.replace("{call}", call_text) for each in (text, thoughts))
    how = options(form, prompt=OPENED)
    made = [piece for number in range(calls) for piece in call(number, "look", AT_X)]
    wanted = [thought(thoughts)] if thoughts else []
    assert read(text, how, size) == ([*wanted, *made], "tool_calls" if calls else "stop")
    # An answer that was cut off might have gone on thinking.
    all_of_it = text.partition("</think>")[0].rstrip()
    assert read(text, how, size, LENGTH) == ([thought(all_of_it)], "length")


@pytest.mark.parametrize("behind", ["No.", hermes(at="y")])
@CUTS
def test_a_call_before_what_is_said_is_a_draft(behind: str, size: int) -> None:
    draft = f"Perhaps {hermes(at='x')}"
    found = read(f"{draft}\n</think>\n\n{behind}", options(prompt=OPENED), size)
    said_then = (
        ([said("No.")], "stop")
        if behind == "No."
        else (call(0, "look", '{"at": "y"}'), "tool_calls")
    )
    assert found == ([thought(draft), *said_then[0]], said_then[1])


# --- calls that are remembered ---------------------------------------------------------------


def remembered(text: str, form: ToolFormat, max_calls: int | None, size: int) -> list[WrittenCall]:
    calls: list[WrittenCall] = []
    how = ParseOptions(CLOSED, TOOLS, form, max_calls, calls.append)
    pieces = join_pieces([p for d in deltas_of(cut(text, size), how) for p in d.pieces])
    for written in calls:
        (place,) = [
            n for n, p in enumerate(pieces) if isinstance(p, ToolCallStart) and p.id == written.id
        ]
        start, arguments = pieces[place : place + 2]
        assert isinstance(start, ToolCallStart)
        assert isinstance(arguments, ToolCallArguments)
        assert (written.name, written.arguments) == (start.name, arguments.text)
    return calls


COMPACT = '<tool_call> {"name":"look","arguments":{"at":"x"}}</tool_call>'
ANOTHER_ORDER = '<tool_call>{"arguments": {"at": "x"}, "name": "look"}</tool_call>'
BRACKET_MISSING = '<tool_call>{"name": "look", "arguments": {"at": "x"}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "call_text"),
    [
        (HERMES, hermes(at="x")), (HERMES, COMPACT), (HERMES, ANOTHER_ORDER),
        (HERMES, BRACKET_MISSING), (XML, xml(at="x", how="{}")), (XML, OPEN_MISSING),
    ],
)  # fmt: skip
@CUTS
def test_calls_are_remembered_as_they_were_written(
    form: ToolFormat, call_text: str, size: int
) -> None:
    calls = remembered(f"Well.\n{call_text}\n{call_text}Done.", form, None, size)
    assert [each.text for each in calls] == [call_text, call_text]


@pytest.mark.parametrize(
    ("form", "call_text", "kept"),
    [
        (HERMES, hermes(at="x"), hermes(at="x")), (HERMES, ANOTHER_ORDER, ANOTHER_ORDER),
        (HERMES, BRACKET_MISSING, BRACKET_MISSING.replace("}", "}}")),
        (HERMES, COMPACT, COMPACT.removesuffix("}</tool_call>") + "}\n</tool_call>"),
        (XML, xml(at="x"), xml(at="x")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_only_call_ends_as_calls_end(
    form: ToolFormat, call_text: str, kept: str, size: int
) -> None:
    (only,) = remembered(call_text * 2, form, 1, size)
    assert only.text in (call_text, kept), "as far as it was read before the answer was cut"


@pytest.mark.parametrize("max_calls", [None, 1])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, hermes(at="x")[:-20]),
        (HERMES, "<tool_call>no</tool_call>"),
        (XML, xml(at="x")[:-30]),
        (XML, "<tool_call><function=look>and so on</tool_call>"),
        (XML, "<tool_call><function=look><parameter=at>\nx\n</parameter>\nand so on"),
        (LLAMA, LLAMA_CALL),
    ],
)
def test_what_is_not_written_as_calls_are_is_not_remembered(
    form: ToolFormat, text: str, max_calls: int | None
) -> None:
    assert remembered(text, form, max_calls, 3) == []


@pytest.mark.parametrize("behind", ["", " and so on"])
def test_a_call_that_lacks_its_closing_tag_is_not_remembered(behind: str) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}'
    assert remembered(text + behind, HERMES, None, 3) == []


# --- stop strings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "parts", "sent"),
    [
        (("END",), ["all of it"], ["all of it", ""]),
        (("END",), ["now END more"], ["now "]),
        (("END",), ["no", "w E", "N", "D", "x"], ["no", "w ", "", ""]),
        (("END",), ["E", "NE", "ND"], ["", "EN", ""]),
        (("END",), ["the EN"], ["the ", "EN"]),
        (("END", "N"), ["EN", "D"], ["E"]),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("x", "abc"), ["abx"], ["ab"]),
        (("aabx", "abyz"), ["aab", "c"], ["", "aabc", ""]),
        (("abyz", "b"), ["xa", "bz"], ["x", "a"]),
        (("ababc",), ["abab", "x"], ["", "ababx", ""]),
        ((), ["any", "thing"], ["any", "thing", ""]),
    ],
)
def test_text_is_sent_up_to_the_first_stop_string(
    stops: tuple[str, ...], parts: list[str], sent: list[str]
) -> None:
    deltas = deltas_of(parts, stop=stops)
    assert [delta.pieces for delta in deltas] == [[said(text)] if text else [] for text in sent]


@pytest.mark.parametrize("parts", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]])
def test_the_stop_string_that_is_complete_first_ends_the_answer(parts: list[str]) -> None:
    deltas = deltas_of(parts, stop=("abcd", "c"), finish=LENGTH)
    assert pieces_of(deltas) == [said("ab")]
    assert (deltas[-1].stop_string, deltas[-1].finish) == ("c", "stop")


def test_of_two_that_are_complete_at_once_the_longer_one_counts() -> None:
    (delta,) = deltas_of(["xabcd"], stop=("cd", "abcd"))
    assert (delta.pieces, delta.stop_string) == ([said("x")], "abcd")


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        deltas_of([], stop=("",))


CALL = hermes()


# --- deltas ----------------------------------------------------------------------------------


def events_of(
    tokenizer: Tokenizer,
    text: str,
    finish: FinishReason | None = None,
    logprob: float | None = None,
) -> list[TokenEvent]:
    *ids, last = ids_of(tokenizer, text)
    return [*(token(each, None, logprob) for each in ids), token(last, finish, logprob)]


def fed(pipeline: TextPipeline, events: list[TokenEvent], step: int = 1000) -> list[Delta]:
    """The deltas of steps with that many events, up to the end."""
    deltas: list[Delta] = []
    while events and not pipeline.finished:
        deltas.append(pipeline.feed(events[:step]))
        events = events[step:]
    return deltas


def test_the_events_of_one_step_make_one_delta(tokenizer: Tokenizer) -> None:
    pipeline = TextPipeline(tokenizer, PARAMS, index=2)
    first = pipeline.feed(events_of(tokenizer, "Hel"))
    assert first == Delta([said("Hel")], index=2, token_ids=tuple(ids_of(tokenizer, "Hel")))
    assert not pipeline.finished
    last = pipeline.feed(events_of(tokenizer, "lo", STOP))
    ids = tuple(ids_of(tokenizer, "lo"))
    assert last == Delta([said("lo")], finish="stop", index=2, token_ids=ids)
    assert pipeline.finished
    assert pipeline.completion_tokens == 5


def test_nothing_is_taken_after_the_end_of_an_answer(tokenizer: Tokenizer) -> None:
    pipeline = TextPipeline(tokenizer, PARAMS, ("STOP",))
    delta = pipeline.feed([*events_of(tokenizer, "a STOP b"), fault()])
    assert (delta.pieces, delta.finish, delta.stop_string) == ([said("a ")], "stop", "STOP")
    assert pipeline.completion_tokens == len("a STOP")


@pytest.mark.parametrize(("how", "reported"), [(None, [-1.0, -2.0]), (options(), [-1.0])])
def test_the_stop_token_is_one_of_the_tokens_of_a_text_and_none_of_a_chats(
    tokenizer: Tokenizer, how: ParseOptions | None, reported: list[float]
) -> None:
    end, letter = token_id(tokenizer, "<|im_end|>"), ids_of(tokenizer, "a")[0]
    params = SamplingParams(100, stop_token_ids=frozenset({end}))
    pipeline = TextPipeline(tokenizer, params, (), how)
    delta = pipeline.feed([token(letter, None, -1.0), token(end, STOP, -2.0)])
    assert [report.logprobs.logprob for report in delta.tokens] == reported
    assert [report.offset for report in delta.tokens] == [0, 1][: len(reported)]


def test_an_answer_whose_time_is_over_ends_with_what_was_held_back(tokenizer: Tokenizer) -> None:
    pipeline = TextPipeline(tokenizer, SamplingParams(100, prompt_logprobs=0), ("STOP",))
    with pytest.raises(GenerationError, match="before it was read"):
        pipeline.finish()
    assert pipeline.feed(events_of(tokenizer, "a ST")).pieces == [said("a ")]
    assert pipeline.finish() == Delta([said("ST")], finish="length")


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
    pipeline = TextPipeline(tokenizer, PARAMS)
    with pytest.raises(GenerationError, match=message):
        pipeline.feed([*events_of(tokenizer, "ab"), event])
    assert not pipeline.finished


@pytest.mark.parametrize("batches", [1, 2, 100])
def test_a_piece_of_content_knows_its_tokens_however_steps_come_together(
    tokenizer: Tokenizer, batches: int
) -> None:
    pipeline = TextPipeline(tokenizer, PARAMS, ("STOP",), options(prompt=PLAIN))
    events = events_of(tokenizer, f"<think>Hm</think>\n\nAb\n{CALL}\ncd STOP", None, -1.0)
    deltas = fed(pipeline, events, -(-len(events) // batches))
    content = [
        piece
        for piece in pieces_of(deltas)
        if isinstance(piece, TextPiece) and piece.channel is Channel.CONTENT
    ]
    texts = ["".join(tokenizer.fast.decode([t.token_id]) for t in p.tokens) for p in content]
    assert [piece.text for piece in content] == ["Ab", "cd "]
    assert texts == ["\n\nAb", "\ncd "]
