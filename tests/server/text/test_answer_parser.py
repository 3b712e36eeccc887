import pytest

from server.text.answer_parser import AnswerParser, ParseOptions
from server.text.calls.tool_format import ToolFormat
from server.text.pieces import AnswerPiece, joined
from tests.server.text.calling import LOOK, call, ids, in_pieces, said, thought

PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
CUTS = pytest.mark.parametrize("cut", [1, 3, 1000])


@CUTS
def test_thoughts_come_first_then_content_and_calls(cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT, (LOOK,)), ids())
    text = f"<think>\nHm.\n</think>\n\nSure.\n{CALL}\n"
    assert joined(in_pieces(parser.feed, text, cut) + parser.flush()) == [
        thought("Hm."),
        said("Sure."),
        *call(0, "look", '{"at": "x"}'),
    ]
    assert parser.ended_with_calls


@CUTS
def test_a_call_that_is_only_thought_of_is_none(cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT + "<think>\n", (LOOK,)), ids())
    text = f"I could do {CALL}.</think>"
    assert joined(in_pieces(parser.feed, text + "No.", cut) + parser.flush()) == [
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
        assert joined(found) == wanted
        assert parser.ended_with_calls is (calls > 0 and not goes_on)


@pytest.mark.parametrize("behind", ["Yes.", CALL.replace("x", "y")])
@CUTS
def test_a_call_before_what_is_said_is_a_draft(behind: str, cut: int) -> None:
    parser = AnswerParser(ParseOptions(PROMPT + "<think>\n", (LOOK,)), ids())
    text = f"Perhaps {CALL}\n</think>\n\n{behind}"
    found = joined(in_pieces(parser.feed, text, cut) + parser.flush())
    assert found[0] == thought(f"Perhaps {CALL}")
    assert found[1:] == ([said(behind)] if behind == "Yes." else call(0, "look", '{"at": "y"}'))


def test_without_tools_a_call_is_content() -> None:
    parser = AnswerParser(ParseOptions(PROMPT))
    assert joined(parser.feed(CALL) + parser.flush()) == [said(CALL)]
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
