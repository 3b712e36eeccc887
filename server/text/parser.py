"""Split an answer's text into reasoning and content."""

from server.text.pieces import AnswerPiece, Channel, TextPiece, joined


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
