"""Split an answer's text into reasoning, content and calls."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.text.calls.parser import CallParser, ThoughtCalls, new_call_id
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import Remember
from server.text.conversation import Tool
from server.text.parser import ReasoningParser, first_channel_of
from server.text.pieces import AnswerPiece, Channel, TextPiece, joined


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How the answer to a chat is taken apart."""

    prompt: str
    """The rendered prompt: its end tells whether the model is reasoning already."""
    tools: tuple[Tool, ...] = ()
    """Those that may be called; where there are none, calls are content."""
    tool_format: ToolFormat = ToolFormat.HERMES
    max_calls: int | None = None
    """The number of calls after which the answer ends."""
    remember: Remember | None = field(default=None, compare=False)
    """Called with every call as it was written."""
    begun: str = ""
    """What a client has begun of the answer's first channel. It belongs to that channel alone,
    whatever it ends with, and is no piece of the answer."""

    @property
    def first_channel(self) -> Channel | None:
        """What the answer begins with; None where the model decides."""
        return first_channel_of(self.prompt, self.begun)

    @property
    def begun_content(self) -> str:
        """The text of the content that a client has begun; empty where it has begun reasoning."""
        return self.begun if self.first_channel is Channel.CONTENT else ""


class AnswerParser:
    """Split an answer while it streams in. However its text is cut, the pieces, joined, are the
    same."""

    def __init__(self, options: ParseOptions, new_id: Callable[[], str] = new_call_id) -> None:
        self._reasoning_parser = ReasoningParser(options.prompt, options.begun)
        self._calls = (
            CallParser(
                options.tools,
                options.tool_format,
                options.max_calls,
                new_id,
                options.remember,
                begun_content=options.begun_content,
            )
            if options.tools
            else None
        )
        self._thought_calls = ThoughtCalls(options.tools, options.tool_format)

    @property
    def reasoning(self) -> bool:
        """Whether the model is thinking now."""
        return self._reasoning_parser.reasoning

    @property
    def done(self) -> bool:
        """Whether the answer has ended, whatever else the model says."""
        return self._calls is not None and self._calls.done

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.calls

    @property
    def ended_with_calls(self) -> bool:
        """Once the answer has ended: whether somebody is to make calls for it."""
        return self._calls is not None and self._calls.ended_with_calls

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text, and return the pieces that are certain now, in order."""
        return joined(self._split(self._reasoning_parser.feed(text)))

    def flush(self, *, cut: bool = False) -> list[AnswerPiece]:
        """Return the other pieces, when the answer ends. cut: whether the model would go on."""
        pieces = self._split(self._reasoning_parser.flush())
        if self._calls is not None:
            thoughts, calls = self._thought_calls.flush(cut=cut)
            pieces += _thought(thoughts) + self._calls.feed(calls) + self._calls.flush(cut=cut)
        return joined(pieces)

    def _split(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        if self._calls is None:
            return pieces
        found: list[AnswerPiece] = []
        for piece in pieces:
            assert isinstance(piece, TextPiece), "calls are found here"
            if piece.channel is Channel.REASONING:
                found += _thought(self._thought_calls.feed(piece.text))
            else:
                # Those before what is said are a draft.
                found += _thought(self._thought_calls.flush(cut=True)[0])
                found += self._calls.feed(piece.text)
        return found


def _thought(text: str) -> list[AnswerPiece]:
    return [TextPiece(Channel.REASONING, text)] if text else []
