"""What an answer is made of, as it streams."""

from dataclasses import dataclass, field

from engine.types import PrefixReport, TokenLogprobs
from server.text.conversation import Channel


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token and its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int = 0
    """Where it begins: the characters of the answer before the one that it begins in."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some text of one channel."""

    channel: Channel
    text: str
    tokens: tuple[TokenReport, ...] = ()
    """What made it, as far as that is content and was reported."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. What follows with its index are its arguments."""

    index: int
    """Counts the calls of one answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Some text of a call's arguments; joined they are JSON, of an object, unless the model got it
    wrong or the answer was cut off."""

    index: int
    text: str


AnswerPiece = TextPiece | ToolCallStart | ToolCallArguments
"""A call has ended when another piece than its arguments comes, or the answer's end."""


def joined(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Join neighbours of one channel, or of one call's arguments, to one piece."""
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
    """Return the length of the longest end of the text that begins one of the strings, but is not
    all of it."""
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
    """Tokens so far: the prompt's once, those of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefix: PrefixReport | None = None
    """What the cache had of the prompt; None while it is not known."""
    kept_tokens: int = 0
    """Tokens of the prompt that the cache has from now on, whether it had them before or not."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to an answer."""

    pieces: list[AnswerPiece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """"stop", "length", or "tool_calls" where the answer ended with calls; with the last delta."""
    index: int = 0
    """Which of the choices it belongs to."""
    stop_string: str | None = None
    """With the last delta: the one that ended the answer."""
    token_ids: tuple[int, ...] = ()
    """All that were generated, those of thoughts, stop strings and ends included."""
    prompt: tuple[TokenLogprobs | None, ...] = ()
    """With the first delta, where they are wanted: log-probabilities of the prompt's tokens; None
    for the first one."""
