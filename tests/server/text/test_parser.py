import pytest

from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel
from server.text.parser import (
    AnswerParser,
    ParseOptions,
    ReasoningParser,
    StopStrings,
    first_channel_of,
)
from server.text.pieces import AnswerPiece, join_pieces, longest_beginning
from tests.server.text.calling import LOOK, call, ids, in_pieces, said, thought

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"


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
@pytest.mark.parametrize("cut", [1, 3, 100])
def test_thoughts_are_split_off_the_beginning(
    prompt: str, text: str, pieces: list[AnswerPiece], cut: int
) -> None:
    parser = ReasoningParser(prompt)
    found: list[AnswerPiece] = []
    for start in range(0, len(text), cut):
        found += parser.feed(text[start : start + cut])
    assert join_pieces(found + parser.flush()) == pieces


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
    parser = ReasoningParser(PLAIN)
    assert parser.feed("<think>One") == [thought("One")]
    assert parser.feed(" two ") == [thought(" two")]
    assert parser.feed("three</th") == [thought(" three")]
    assert parser.feed("ink>\nA") == [said("A")]
    assert parser.feed(" b ") == [said(" b ")]


def test_it_knows_when_the_model_is_thinking() -> None:
    assert ReasoningParser(OPENED).reasoning
    assert not ReasoningParser(CLOSED).reasoning
    parser = ReasoningParser(PLAIN)
    assert not parser.reasoning
    parser.feed("<think>")
    assert parser.reasoning
    parser.feed("</think>")
    assert not parser.reasoning


@pytest.mark.parametrize(
    ("text", "wanted", "length"),
    [
        ("", ("ab",), 0),
        ("a", ("ab",), 1),
        ("xa", ("ab",), 1),
        ("ax", ("ab",), 0),
        ("ab", ("ab",), 0),
        ("aba", ("ab",), 1),
        ("aab", ("aabx", "abyz"), 3),
        ("xab", ("abyz", "b"), 2),
        ("abab", ("ababc",), 4),
        ("b", ("b", "bc"), 1),
        ("a", ("b",), 0),
    ],
)
def test_the_longest_end_that_begins_something_longer_is_found(
    text: str, wanted: tuple[str, ...], length: int
) -> None:
    assert longest_beginning(text, *wanted) == length


PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
CUTS = pytest.mark.parametrize("cut", [1, 3, 1000])


@CUTS
def test_thoughts_come_first_then_content_and_calls(cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT, (LOOK,)), ids())
    text = f"<think>\nHm.\n</think>\n\nSure.\n{CALL}\n"
    assert join_pieces(in_pieces(parser.feed, text, cut) + parser.flush()) == [
        thought("Hm."),
        said("Sure."),
        *call(0, "look", '{"at": "x"}'),
    ]
    assert parser.ended_with_calls


@CUTS
def test_a_call_that_is_only_thought_of_is_none(cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT + "<think>\n", (LOOK,)), ids())
    text = f"I could do {CALL}.</think>"
    assert join_pieces(in_pieces(parser.feed, text + "No.", cut) + parser.flush()) == [
        thought(f"I could do {CALL}."),
        said("No."),
    ]
    assert not parser.ended_with_calls


XML_CALL = "<function=look>\n<parameter=at>\nx\n</parameter>\n</function>"
FORMS = {CALL: ToolFormat.HERMES, XML_CALL: ToolFormat.XML}


@pytest.mark.parametrize("call_text", FORMS)
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
    call_text: str, text: str, thoughts: str, calls: int, cut: int
) -> None:
    parse_options = ParseOptions(PROMPT + "<think>\n", (LOOK,), FORMS[call_text])
    text, thoughts = (each.replace("{call}", call_text) for each in (text, thoughts))
    for goes_on in (False, True):
        parser = AnswerParser(parse_options, ids())
        wanted: list[AnswerPiece] = [thought(thoughts)] if thoughts else []
        if goes_on:
            wanted = [thought(text.partition("</think>")[0].rstrip())]
        else:
            wanted += [p for n in range(calls) for p in call(n, "look", '{"at": "x"}')]
        found = in_pieces(parser.feed, text, cut) + parser.flush(cut=goes_on)
        assert join_pieces(found) == wanted
        assert parser.ended_with_calls is (calls > 0 and not goes_on)


@pytest.mark.parametrize("behind", ["Yes.", CALL.replace("x", "y")])
@CUTS
def test_a_call_before_what_is_said_is_a_draft(behind: str, cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT + "<think>\n", (LOOK,)), ids())
    text = f"Perhaps {CALL}\n</think>\n\n{behind}"
    found = join_pieces(in_pieces(parser.feed, text, cut) + parser.flush())
    assert found[0] == thought(f"Perhaps {CALL}")
    assert found[1:] == ([said(behind)] if behind == "Yes." else call(0, "look", '{"at": "y"}'))


def test_without_tools_a_call_is_content() -> None:
    parser = AnswerParser(ParseOptions(PROMPT))
    assert join_pieces(parser.feed(CALL) + parser.flush()) == [said(CALL)]
    assert not parser.ended_with_calls
    assert not parser.done


def test_it_knows_when_the_model_is_thinking_and_when_it_is_done() -> None:
    parser = AnswerParser(ParseOptions(PROMPT, (LOOK,), ToolFormat.XML, max_calls=1))
    parser.feed("<think>")
    assert parser.reasoning
    parser.feed("</think><function=look>")
    assert not parser.reasoning
    assert not parser.done
    parser.feed("</function>")
    assert parser.done
    assert parser.ended_with_calls


@pytest.mark.parametrize(
    ("stops", "pieces", "sent"),
    [
        (("END",), ["all of it"], ["all of it"]),
        (("END",), ["now END more"], ["now "]),
        (("END",), ["no", "w E", "N", "D", "x"], ["no", "w ", "", "", ""]),
        (("END",), ["E", "NE", "ND"], ["", "EN", ""]),
        (("END", "N"), ["EN", "D"], ["E", ""]),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("x", "abc"), ["abx"], ["ab"]),
        ((), ["any", "thing"], ["any", "thing"]),
    ],
)
def test_text_is_sent_up_to_the_first_stop_string(
    stops: tuple[str, ...], pieces: list[str], sent: list[str]
) -> None:
    stop = StopStrings(stops)
    assert [stop.feed(piece) for piece in pieces] == sent


def test_the_stop_string_that_is_complete_first_ends_the_answer() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        stop = StopStrings(("abcd", "c"))
        assert "".join(stop.feed(piece) for piece in pieces) == "ab"
        assert stop.matched == "c"


def test_of_two_that_are_complete_at_once_the_longer_one_counts() -> None:
    stop = StopStrings(("cd", "abcd"))
    assert stop.feed("xabcd") == "x"
    assert stop.matched == "abcd"


def test_what_was_held_back_comes_out_when_the_answer_ends_otherwise() -> None:
    stop = StopStrings(("END",))
    assert stop.feed("the EN") == "the "
    assert stop.matched is None
    assert stop.flush() == "EN"
    assert stop.flush() == ""


def test_nothing_comes_out_after_a_match() -> None:
    stop = StopStrings(("END",))
    stop.feed("END and")
    assert stop.feed("more") == ""
    assert stop.flush() == ""


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopStrings(("",))
