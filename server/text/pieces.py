"""The pieces of a streamed answer: text, calls, and reports about tokens."""

from dataclasses import dataclass, field

from engine.types import DraftReport, PrefixReport, TokenLogprobs
from server.text.conversation import Channel


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token with log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int = 0
    """Number of characters in the answer before the first character of this token."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of one channel: reasoning or content."""

    channel: Channel
    text: str
    tokens: tuple[TokenReport, ...] = ()
    """The text's tokens, if the text is content and log-probabilities are requested."""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. The arguments follow in pieces with the same index."""

    index: int
    """Number of earlier calls in the answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of a tool call's arguments. The joined parts are usually a JSON object."""

    index: int
    text: str


AnswerPiece = TextPiece | ToolCallStart | ToolCallArguments
"""A part of an answer. A call ends at the first piece that does not continue its arguments."""


def join_pieces(pieces: list[AnswerPiece]) -> list[AnswerPiece]:
    """Join neighbouring texts of one channel, and neighbouring arguments of one call."""
    if len(pieces) < 2:
        return pieces
    result: list[AnswerPiece] = []
    for piece in pieces:
        match result[-1:], piece:
            case [TextPiece() as last], TextPiece(channel, text, tokens) if channel is last.channel:
                result[-1] = TextPiece(channel, last.text + text, last.tokens + tokens)
            case [ToolCallArguments() as last], ToolCallArguments(index, text) if (
                index == last.index
            ):
                result[-1] = ToolCallArguments(index, last.text + text)
            case _:
                result.append(piece)
    return result


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of the tokens up to now in all prompts and answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefix: PrefixReport | None = None
    """The prefix cache's report on the prompts. It is None before the first token."""
    kept_tokens: int = 0
    """Number of prompt tokens in the prefix cache after the request, also if cached before."""
    drafts: DraftReport | None = None
    """The sums of the answers' reports, or None if no answer had drafts."""
    first_token_s: float | None = field(default=None, compare=False)
    """Seconds from the request's arrival to its first token, including the wait in the queue."""
    generating_s: float = field(default=0.0, compare=False)
    """The longest time in seconds from an answer's first token to its newest token."""
    elapsed_s: float = field(default=0.0, compare=False)
    """Seconds from the request's arrival until now."""
    tokens_per_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """The newly generated part of one answer."""

    pieces: list[AnswerPiece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """The reason for the end, only in the last delta: "stop", "length" or "tool_calls"."""
    index: int = 0
    """The index of the answer (choice) in the request."""
    stop_string: str | None = None
    """The stop string that ended the answer. Only the last delta has it."""
    token_ids: tuple[int, ...] = ()
    """The ids of all new tokens, including tokens of reasoning, stop strings and stop tokens."""
    prompt: tuple[TokenLogprobs | None, ...] = ()
    """The log-probabilities of the prompt's tokens, if requested. Only the first delta has them.
    The first prompt token has None."""
    prefix: PrefixReport | None = None
