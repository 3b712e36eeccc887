"""Split an answer's streamed text into reasoning, content and calls, and search stop strings."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.text.calls.parser import CallParser, ThoughtCalls, new_call_id
from server.text.calls.tool_format import ToolFormat
from server.text.calls.written import Remember
from server.text.conversation import Channel, Tool
from server.text.pieces import AnswerPiece, TextPiece, join_pieces, longest_beginning

OPEN, CLOSE = "<think>", "</think>"


def first_channel_of(prompt: str, begun: str = "") -> Channel | None:
    """Return the channel in which an answer begins, or None if the model decides. The end of
    ``prompt`` may open or close reasoning. ``begun`` is the client's beginning of the answer."""
    ending = prompt.rstrip()
    if ending.endswith(CLOSE):
        return Channel.CONTENT
    if ending.endswith(OPEN):
        return Channel.REASONING
    return Channel.CONTENT if begun else None


class ReasoningParser:
    """Splits ``<think>...</think>`` off the beginning of an answer.

    White space around the tags is dropped. If neither the prompt nor the answer has an opening tag,
    the answer is content. Without a closing tag, the text after the opening tag is reasoning."""

    def __init__(self, prompt: str, begun: str = "") -> None:
        self._state = first_channel_of(prompt, begun)
        self._begun = self._state is Channel.CONTENT or bool(begun.strip())
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """True while the model is reasoning."""
        return self._state is Channel.REASONING

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in the next text. Return the pieces that later text cannot change."""
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
    """Return the length of white space and of the beginning of a closing tag at the text's end."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        if CLOSE.startswith(text[-length:]):
            before = text[:-length]
            return length + len(before) - len(before.rstrip())
    return len(text) - len(text.rstrip())


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Rules for parsing the answer to a chat."""

    prompt: str
    """The rendered prompt. Its end shows if the model is already reasoning."""
    tools: tuple[Tool, ...] = ()
    """The tools that may be called. Without tools, calls are content."""
    tool_format: ToolFormat = ToolFormat.HERMES
    max_calls: int | None = None
    """The number of calls after which the answer ends. None means no limit."""
    remember: Remember | None = field(default=None, compare=False)
    """A function that stores each complete call."""
    begun: str = ""
    """The beginning of the answer that the client has written. No piece contains it."""

    @property
    def first_channel(self) -> Channel | None:
        return first_channel_of(self.prompt, self.begun)

    @property
    def begun_content(self) -> str:
        """The beginning of the content that the client has written, or "" if it is reasoning."""
        return self.begun if self.first_channel is Channel.CONTENT else ""


class AnswerParser:
    """Splits an answer into pieces. The joined pieces are the same wherever the text is cut."""

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
        """True if the answer has the last call that is allowed. Further text is ignored."""
        return self._calls is not None and self._calls.done

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.calls

    @property
    def ended_with_calls(self) -> bool:
        """True if the client must execute calls. The value is valid only after the answer's end."""
        return self._calls is not None and self._calls.ended_with_calls

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in the next text. Return the pieces that later text cannot change."""
        return join_pieces(self._split(self._reasoning_parser.feed(text)))

    def flush(self, *, cut: bool = False) -> list[AnswerPiece]:
        """Return the last pieces of the answer. ``cut`` is True if the answer was cut off."""
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
                # Content follows, so calls in the reasoning are a draft and stay reasoning.
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
        """Take in text and return the part that may be sent. After a match, return ""."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops]
        matches = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if matches:
            # Choose the stop string that ends first, so that cuts of the fed texts do not matter.
            _, place, self.matched = min(matches)
            self._held = ""
            return held[:place]
        keep = longest_beginning(held, *self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text that was held back. Call this when the answer ends without a match."""
        rest, self._held = self._held, ""
        return rest
