import pytest

from server.text.parser import ReasoningParser, first_channel_of, longest_beginning
from server.text.pieces import AnswerPiece, Channel, TextPiece, joined

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"


def thought(text: str) -> TextPiece:
    return TextPiece(Channel.REASONING, text)


def said(text: str) -> TextPiece:
    return TextPiece(Channel.CONTENT, text)


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
    assert joined(found + parser.flush()) == pieces


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
