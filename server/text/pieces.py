"""The pieces of a streamed answer."""

from dataclasses import dataclass, field

from engine.types import PrefixReport, TokenLogprobs
from server.text.conversation import Channel


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token and its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int = 0
    """Number of the answer's characters before the token's first character."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of one channel."""

    channel: Channel
    text: str
    tokens: tuple[TokenReport, ...] = ()
    """The tokens that make the text, if the channel is content and log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call. Its arguments follow in pieces with the same index."""

    index: int
    """Index of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of a call's arguments. The joined parts are usually a JSON object."""

    index: int
    text: str


AnswerPiece = TextPiece | ToolCallStart | ToolCallArguments
"""A call ends before the next piece that is not its arguments, or with the answer."""


def join_pieces(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Join neighbours of one channel, and neighbours of one call's arguments."""
    if len(pieces) < 2:
        return pieces
    result: list[AnswerPiece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if (
            isinstance(piece, TextPiece)
            and isinstance(last, TextPiece)
            and piece.channel is last.channel
        ):
            text, tokens = last.text + piece.text, last.tokens + piece.tokens
            result[-1] = TextPiece(last.channel, text, tokens)
        elif (
            isinstance(piece, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and piece.index == last.index
        ):
            result[-1] = ToolCallArguments(last.index, last.text + piece.text)
        else:
            result.append(piece)
    return result


def longest_beginning(text: str, *starts: str) -> int:
    """Return the length of the longest end of the text that is a proper prefix of a string."""
    longest = 0
    for each in starts:
        place = text.find(each[0], max(0, len(text) - len(each) + 1))
        while place >= 0 and not each.startswith(text[place:]):
            place = text.find(each[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts so far, of the prompts and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefix: PrefixReport | None = None
    """The cache's report on the prompt; None before the first token."""
    kept_tokens: int = 0
    """Number of prompt tokens that the cache keeps from now on, both old and new."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The parts of one choice's answer that one step adds."""

    pieces: list[AnswerPiece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """Set in the last delta: "stop", "length", or "tool_calls" if the answer ended with calls."""
    index: int = 0
    """Index of the choice."""
    stop_string: str | None = None
    """Set in the last delta: the stop string that ended the answer."""
    token_ids: tuple[int, ...] = ()
    """All generated tokens, including those of reasoning, stop strings and ends."""
    prompt: tuple[TokenLogprobs | None, ...] = ()
    """Set in the first delta if wanted: log-probabilities of the prompt; the first is None."""
