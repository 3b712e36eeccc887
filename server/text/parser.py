"""An answer's text -> what was thought and what is said."""

from server.text.pieces import AnswerPiece, Part, Piece, joined

OPEN, CLOSE = "<think>", "</think>"


def thinking_part(prompt: str, begun: str = "") -> Part | None:
    """What an answer to a rendered prompt begins with: a thought or content, where the template has
    opened or closed the tag already; None where the model decides. begun: what follows the prompt
    of that part."""
    ending = prompt.rstrip()
    if ending.endswith(CLOSE):
        return Part.CONTENT
    if ending.endswith(OPEN):
        return Part.REASONING
    return Part.CONTENT if begun else None


class ReasoningParser:
    """Splits ``<think>...</think>`` off the beginning of an answer, as it streams in.

    White space around the tags belongs to neither part. An answer that does not begin with the tag
    is content; one that never closes it is reasoning.
    """

    def __init__(self, prompt: str, begun: str = "") -> None:
        """prompt: its end tells whether the template has opened or closed the tag already. begun:
        the part's text before the one that is fed."""
        self._state = thinking_part(prompt, begun)
        self._begun = self._state is Part.CONTENT or bool(begun.strip())
        self._held = ""

    @property
    def reasoning(self) -> bool:
        """Whether the model is thinking now."""
        return self._state is Part.REASONING

    def feed(self, text: str) -> list[AnswerPiece]:
        """Pieces that are certain now, in order; neighbours belong to different parts."""
        self._held += text
        return joined(self._advance(final=False))

    def flush(self) -> list[AnswerPiece]:
        """The rest, when the answer ends."""
        return joined(self._advance(final=True))

    def _advance(self, final: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._state is None:
            text = self._held.lstrip()
            if not text.startswith(OPEN) and OPEN.startswith(text) and not final:
                return pieces
            self._state = Part.CONTENT
            if text.startswith(OPEN):
                self._state = Part.REASONING
                self._held = text[len(OPEN) :]
            else:
                self._begun = True
        if self._state is Part.REASONING:
            pieces += self._take_reasoning(final)
        if self._state is Part.CONTENT:
            pieces += self._take_content()
        return pieces

    def _take_reasoning(self, final: bool) -> list[AnswerPiece]:
        thought, closed, rest = self._held.partition(CLOSE)
        if closed:
            self._held, self._state = rest, Part.CONTENT
            return self._piece(Part.REASONING, thought.rstrip(), ended=True)
        keep = 0 if final else _uncertain_end(thought)
        certain = thought[: len(thought) - keep]
        self._held = thought[len(certain) :]
        return self._piece(Part.REASONING, certain.rstrip() if final else certain)

    def _take_content(self) -> list[AnswerPiece]:
        text, self._held = self._held, ""
        return self._piece(Part.CONTENT, text)

    def _piece(self, part: Part, text: str, *, ended: bool = False) -> list[AnswerPiece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = (self._begun or bool(text)) and not ended
        return [Piece(part, text)] if text else []


def _uncertain_end(text: str) -> int:
    """Length of the end of a thought that may be white space before the closing tag, or its
    beginning."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        if CLOSE.startswith(text[-length:]):
            before = text[:-length]
            return length + len(before) - len(before.rstrip())
    return len(text) - len(text.rstrip())
