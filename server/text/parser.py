"""Split an answer's streamed text into reasoning, content and calls, and end it at stop strings."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.text.calls.parser import CallParser, ThoughtCalls, new_call_id
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import Remember
from server.text.conversation import Channel, Tool
from server.text.pieces import AnswerPiece, TextPiece, join_pieces, longest_beginning

OPEN, CLOSE = "<think>", "</think>"


def first_channel_of(prompt: str, begun: str = "") -> Channel | None:
    """Return the channel that an answer begins in, or None if the model decides. prompt: its end
    may open or close reasoning. begun: text with which the client has begun the channel."""
    ending = prompt.rstrip()
    if ending.endswith(CLOSE):
        return Channel.CONTENT
    if ending.endswith(OPEN):
        return Channel.REASONING
    return Channel.CONTENT if begun else None


class ReasoningParser:
    """Splits ``<think>...</think>`` off the beginning of an answer.

    White space around the tags belongs to no channel. Without the opening tag, also in the prompt,
    an answer is content. With an opening tag but no closing tag, an answer is reasoning."""

    def __init__(self, prompt: str, begun: str = "") -> None:
        self._state = first_channel_of(prompt, begun)
        self._begun = self._state is Channel.CONTENT or bool(begun.strip())
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the model is reasoning now."""
        return self._state is Channel.REASONING

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text and return the pieces of it, and of earlier text, that are certain now."""
        self._held += text
        return join_pieces(self._advance(final=False))

    def flush(self) -> list[AnswerPiece]:
        return join_pieces(self._advance(final=True))

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
            text, self._held = self._held, ""
            pieces += self._piece(Channel.CONTENT, text)
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

    def _piece(self, channel: Channel, text: str, *, ended: bool = False) -> list[AnswerPiece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = (self._begun or bool(text)) and not ended
        return [TextPiece(channel, text)] if text else []


def _uncertain_end(text: str) -> int:
    """Return the length of the text's end that may be white space and part of a closing tag."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        if CLOSE.startswith(text[-length:]):
            before = text[:-length]
            return length + len(before) - len(before.rstrip())
    return len(text) - len(text.rstrip())


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Rules for parsing the answer to a chat."""

    prompt: str
    """The rendered prompt, whose end shows whether the model already reasons."""
    tools: tuple[Tool, ...] = ()
    """The tools that may be called. Without tools, calls are content."""
    tool_format: ToolFormat = ToolFormat.HERMES
    max_calls: int | None = None
    """Number of calls after which the answer ends; None means no limit."""
    remember: Remember | None = field(default=None, compare=False)
    """A function that stores every complete call."""
    begun: str = ""
    """Text with which the client has begun the answer's first channel; no piece contains it."""

    @property
    def first_channel(self) -> Channel | None:
        return first_channel_of(self.prompt, self.begun)

    @property
    def begun_content(self) -> str:
        """Text with which the client has begun the content; "" if it has begun the reasoning."""
        return self.begun if self.first_channel is Channel.CONTENT else ""


class AnswerParser:
    """Splits an answer into pieces. The joined pieces do not depend on where fed texts are cut."""

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
        return self._reasoning_parser.reasoning

    @property
    def done(self) -> bool:
        """Whether the answer has its last allowed call, so that further text is ignored."""
        return self._calls is not None and self._calls.done

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.calls

    @property
    def ended_with_calls(self) -> bool:
        """Whether the client must execute calls. The value is only valid after the answer's end."""
        return self._calls is not None and self._calls.ended_with_calls

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text and return the pieces that are certain now."""
        return join_pieces(self._split(self._reasoning_parser.feed(text)))

    def flush(self, *, cut: bool = False) -> list[AnswerPiece]:
        """Return the remaining pieces at the answer's end. cut: whether the answer was cut off."""
        pieces = self._split(self._reasoning_parser.flush())
        if self._calls is not None:
            thoughts, calls = self._thought_calls.flush(cut=cut)
            pieces += _thought(thoughts) + self._calls.feed(calls) + self._calls.flush(cut=cut)
        return join_pieces(pieces)

    def _split(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        if self._calls is None:
            return pieces
        split: list[AnswerPiece] = []
        for piece in pieces:
            assert isinstance(piece, TextPiece), "calls are found here"
            if piece.channel is Channel.REASONING:
                split += _thought(self._thought_calls.feed(piece.text))
            else:
                # Calls in the reasoning are only a draft if content follows.
                split += _thought(self._thought_calls.flush(cut=True)[0])
                split += self._calls.feed(piece.text)
        return split


def _thought(text: str) -> list[AnswerPiece]:
    return [TextPiece(Channel.REASONING, text)] if text else []


class StopStrings:
    """Holds back text that may begin a stop string, so that no part of a stop string is sent."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that has ended the answer, or None while there is none."""

    def feed(self, text: str) -> str:
        """Take in text and return the part that may be sent; "" after a match."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops]
        matches = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if matches:
            # Prefer the stop string that ends first: so it does not matter how the text is cut.
            _, place, self.matched = min(matches)
            self._held = ""
            return held[:place]
        keep = longest_beginning(held, *self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text that was held back, because the answer has ended without a match."""
        rest, self._held = self._held, ""
        return rest
