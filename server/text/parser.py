"""Split an answer's text into reasoning and content."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.text.calls.parser import CallParser, ThoughtCalls, new_call_id
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import Remember
from server.text.conversation import Channel, Tool
from server.text.pieces import AnswerPiece, TextPiece, joined, longest_beginning

OPEN, CLOSE = "<think>", "</think>"


def first_channel_of(prompt: str, begun: str = "") -> Channel | None:
    """Return the channel that an answer begins with, where the template has opened or closed the
    tag already; None where the model decides. prompt: rendered. begun: what a client has begun of
    that channel."""
    ending = prompt.rstrip()
    if ending.endswith(CLOSE):
        return Channel.CONTENT
    if ending.endswith(OPEN):
        return Channel.REASONING
    return Channel.CONTENT if begun else None


class ReasoningParser:
    """Split ``<think>...</think>`` off the beginning of an answer, as it streams in.

    White space around the tags belongs to neither channel. An answer that does not begin with the
    tag is content; one that never closes it is reasoning.
    """

    def __init__(self, prompt: str, begun: str = "") -> None:
        """prompt: its end tells whether the template has opened or closed the tag already. begun:
        the text of that channel before what is fed."""
        self._state = first_channel_of(prompt, begun)
        self._begun = self._state is Channel.CONTENT or bool(begun.strip())
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the model is thinking now."""
        return self._state is Channel.REASONING

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text, and return the pieces that are certain now, in order; neighbours belong to
        different channels."""
        self._held += text
        return joined(self._advance(final=False))

    def flush(self) -> list[AnswerPiece]:
        return joined(self._advance(final=True))

    def _advance(self, final: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._state is None:
            text = self._held.lstrip()
            if not text.startswith(OPEN) and OPEN.startswith(text) and not final:
                return pieces
            self._state = Channel.CONTENT
            if text.startswith(OPEN):
                self._state = Channel.REASONING
                self._held = text[len(OPEN) :]
            else:
                self._begun = True
        if self._state is Channel.REASONING:
            pieces += self._take_reasoning(final)
        if self._state is Channel.CONTENT:
            pieces += self._take_content()
        return pieces

    def _take_reasoning(self, final: bool) -> list[AnswerPiece]:
        reasoning, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._held, self._state = rest, Channel.CONTENT
            return self._piece(Channel.REASONING, reasoning.rstrip(), ended=True)
        keep = 0 if final else _uncertain_end(reasoning)
        certain = reasoning[: len(reasoning) - keep]
        self._held = reasoning[len(certain) :]
        return self._piece(Channel.REASONING, certain.rstrip() if final else certain)

    def _take_content(self) -> list[AnswerPiece]:
        text, self._held = self._held, ""
        return self._piece(Channel.CONTENT, text)

    def _piece(self, channel: Channel, text: str, *, ended: bool = False) -> list[AnswerPiece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = (self._begun or bool(text)) and not ended
        return [TextPiece(channel, text)] if text else []


def _uncertain_end(text: str) -> int:
    """Return the length of the end of the text that may be white space before the closing tag, or
    the tag's beginning."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        if CLOSE.startswith(text[-length:]):
            before = text[:-length]
            return length + len(before) - len(before.rstrip())
    return len(text) - len(text.rstrip())


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


class StopStrings:
    """Hold back text that may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops: none of them empty."""
        assert all(stops)
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the answer."""

    def feed(self, text: str) -> str:
        """Take in text, and return what may be sent. After a match that is nothing."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops]
        found = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            _, place, self.matched = min(found)
            self._held = ""
            return held[:place]
        keep = longest_beginning(held, *self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return what was held back, when the answer ends otherwise."""
        rest, self._held = self._held, ""
        return rest
