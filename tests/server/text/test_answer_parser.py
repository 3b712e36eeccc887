import pytest

from server.text.answer_parser import AnswerParser, ParseOptions
from server.text.calls.tool_format import ToolFormat
from server.text.pieces import joined
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
