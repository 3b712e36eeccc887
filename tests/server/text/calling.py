"""Answers of models that call, and what a pipeline makes of tokens that are spelled as wanted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from engine.types import FinishReason, SamplingParams, TokenEvent
from server.text.conversation import Channel, Tool
from server.text.harmony import SIGNS
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from server.text.pipeline import ParseOptions, TextPipeline
from server.text.tokenizer import Tokenizer

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
PARAMS = SamplingParams(max_tokens=1000)


class SpelledTokens:
    """A tokenizer whose token 0, 1, ... has the text ``parts[0]``, ``parts[1]``, ... Those that
    are a token of Harmony's have its sign."""

    special_ids = special_tag_ids = frozenset[int]()
    drops_space = False

    def __init__(self, parts: Sequence[str | bytes]) -> None:
        self._parts = [part.encode() if isinstance(part, str) else part for part in parts]
        texts = [part.decode(errors="replace") for part in self._parts]
        self.signs = {number: SIGNS[text] for number, text in enumerate(texts) if text in SIGNS}

    def token_bytes(self, token_id: int) -> bytes:
        return self._parts[token_id] if token_id < len(self._parts) else b""


def deltas_of(
    parts: Sequence[str],
    options: ParseOptions | None = None,
    *,
    stop: tuple[str, ...] = (),
    finish: FinishReason = FinishReason.STOP,
) -> list[Delta]:
    """The deltas of an answer with one token for each part, and one without text at the end."""
    pipeline = TextPipeline(cast(Tokenizer, SpelledTokens(parts)), PARAMS, stop, options)
    events = [TokenEvent(1, number, None) for number in range(len(parts))]
    deltas: list[Delta] = []
    for event in [*events, TokenEvent(1, len(parts), finish)]:
        if not pipeline.finished:
            deltas.append(pipeline.feed([event]))
    return deltas


def cut(text: str, size: int) -> list[str]:
    """The text in parts of that many characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def pieces_of(deltas: Sequence[Delta]) -> list[AnswerPiece]:
    return joined(piece for delta in deltas for piece in delta.pieces)


def joined(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """The pieces as a client joins them; the ids of calls are call_0, call_1, ..."""
    return [
        replace(piece, id=f"call_{piece.index}") if isinstance(piece, ToolCallStart) else piece
        for piece in join_pieces(list(pieces))
    ]


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
    return joined([piece for part in cut(text, size) for piece in feed(part)])
