"""Answers of models that call, and parsers whose ids count."""

from collections.abc import Callable
from itertools import count

from server.text.conversation import Channel, Tool
from server.text.pieces import (
    AnswerPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)

LOOK = Tool(
    "look",
    parameters={
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "times": {"type": "integer"},
            "how": {"type": "object"},
            "who": {"type": ["string", "null"]},
        },
    },
)


def ids() -> Callable[[], str]:
    """call_0, call_1, ..."""
    numbers = count()
    return lambda: f"call_{next(numbers)}"


def said(text: str) -> TextPiece:
    return TextPiece(Channel.CONTENT, text)


def thought(text: str) -> TextPiece:
    return TextPiece(Channel.REASONING, text)


def call(index: int, name: str, arguments: str) -> list[AnswerPiece]:
    """A call and its arguments, if it has any yet."""
    start = ToolCallStart(index, f"call_{index}", name)
    return [start, ToolCallArguments(index, arguments)] if arguments else [start]


def in_pieces(feed: Callable[[str], list[AnswerPiece]], text: str, size: int) -> list[AnswerPiece]:
    """What comes of a text that is fed in pieces of so many characters."""
    found: list[AnswerPiece] = []
    for start in range(0, len(text), size):
        found += feed(text[start : start + size])
    return join_pieces(found)
