from engine.types import TokenLogprobs
from server.text.conversation import Channel
from server.text.pieces import (
    TextPiece,
    TokenReport,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)


def thought(text: str) -> TextPiece:
    return TextPiece(Channel.REASONING, text)


def said(text: str) -> TextPiece:
    return TextPiece(Channel.CONTENT, text)


def test_neighbours_of_one_part_are_joined() -> None:
    assert join_pieces([thought("a"), thought("b"), said("c"), said("d")]) == [
        thought("ab"),
        said("cd"),
    ]


def test_what_is_joined_has_the_tokens_of_all() -> None:
    one, other = (TokenReport(number, TokenLogprobs(-1.0, ())) for number in (1, 2))
    pieces = [
        TextPiece(Channel.CONTENT, "a", (one,)),
        said("b"),
        TextPiece(Channel.CONTENT, "c", (other,)),
    ]
    assert join_pieces([*pieces]) == [TextPiece(Channel.CONTENT, "abc", (one, other))]


def test_the_arguments_of_one_call_are_joined_and_those_of_two_are_not() -> None:
    starts = [ToolCallStart(0, "call_a", "f"), ToolCallStart(1, "call_b", "f")]
    assert join_pieces(
        [
            said("a"),
            starts[0],
            ToolCallArguments(0, "{"),
            ToolCallArguments(0, "}"),
            ToolCallArguments(1, "{"),
            starts[1],
            ToolCallArguments(1, "}"),
            said("b"),
        ]
    ) == [
        said("a"),
        starts[0],
        ToolCallArguments(0, "{}"),
        ToolCallArguments(1, "{"),
        starts[1],
        ToolCallArguments(1, "}"),
        said("b"),
    ]
