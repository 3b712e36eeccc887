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
    """The characters of the answer before the one that the token begins in."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A text of one channel."""

    channel: Channel
    text: str
    tokens: tuple[TokenReport, ...] = ()
    """The tokens of a content's text, where they are reported."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call. Its arguments follow with the same index."""

    index: int
    """Counts the calls of one answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A text of a call's arguments. Joined, they are a JSON object, unless the model erred or the
    answer was cut off."""

    index: int
    text: str


AnswerPiece = TextPiece | ToolCallStart | ToolCallArguments
"""A call ends with the next piece that is not its arguments, or with the answer."""


def join_pieces(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Join neighbours of one channel, or of one call's arguments."""
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
    """Return the length of the longest end of the text that begins one of the strings without
    completing it."""
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
    """Token counts so far, of the prompt and of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefix: PrefixReport | None = None
    """The cache's report on the prompt; None before it comes."""
    kept_tokens: int = 0
    """Tokens of the prompt that the cache keeps from now on, old and new ones."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of an answer that one step adds."""

    pieces: list[AnswerPiece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """"stop", "length", or "tool_calls" where the answer ended with calls; in the last delta."""
    index: int = 0
    """The choice that it belongs to."""
    stop_string: str | None = None
    """The stop string that ended the answer; in the last delta."""
    token_ids: tuple[int, ...] = ()
    """All generated tokens, those of reasoning, stop strings and ends included."""
    prompt: tuple[TokenLogprobs | None, ...] = ()
    """Log-probabilities of the prompt's tokens, where they are wanted, in the first delta; None for
    the first token."""
