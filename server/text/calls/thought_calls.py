"""Calls at the end of thoughts, by models that forget to close these.

A call that is written out, and that nothing follows but the tag that closes the thoughts, is one.
Whatever the model goes on behind is a thought.
"""

from server.text.beginnings import longest_beginning
from server.text.calls.parser import CallParser, first_opening
from server.text.calls.tool_format import OPENERS, OPENING, ToolFormat
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, TextPiece


class ThoughtCalls:
    """Hold back the end of thoughts while it may be calls."""

    def __init__(self, tools: tuple[Tool, ...], form: ToolFormat) -> None:
        self._tools = tools
        self._form = form
        self._held = ""
        self._begins_line = True
        self._trial: CallParser | None = None
        """Reads what is held, from a call's opening tag on."""

    def feed(self, text: str) -> str:
        """Take in thoughts, and return those that are certain."""
        self._held += text
        certain = ""
        while True:
            if self._trial is None:
                opening = first_opening(OPENING[self._form], self._held, self._begins_line)
                end = len(self._held) - longest_beginning(self._held, *OPENERS)
                end = end if opening is None else opening.start(1)
                certain += self._taken(len(self._held[:end].rstrip()))
                if opening is None:
                    return certain
                self._trial, text = CallParser(self._tools, self._form, None), self._held
            if not _says(self._trial.feed(text)):
                return certain
            # A call may begin behind this tag.
            self._trial = None
            certain += self._taken(len(self._held) - len(self._held.lstrip()) + 1)

    def flush(self, *, cut: bool) -> tuple[str, str]:
        """Return the other thoughts, and the text of calls, when the answer ends. cut: whether the
        model would go on: then all are thoughts."""
        trial, held = self._trial, self._taken(len(self._held))
        self._trial = None
        if cut or trial is None or _says(trial.flush(cut=True)) or not trial.ended_with_calls:
            return held, ""
        return "", held

    def _taken(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._begins_line = self._begins_line and not text
        return text


def _says(pieces: list[AnswerPiece]) -> bool:
    return any(isinstance(piece, TextPiece) for piece in pieces)
