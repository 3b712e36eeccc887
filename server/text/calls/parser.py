"""Split content into text and calls."""

import re
import secrets
from collections.abc import Callable

from server.text.calls.hermes import HermesCall
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, OPENERS, OPENING, ToolFormat
from server.text.calls.written import CallRecord, Remember
from server.text.calls.xml import XmlCall
from server.text.conversation import Channel, Tool
from server.text.pieces import AnswerPiece, TextPiece, longest_beginning

CALL_ID_BYTES = 12
# Of a call that a client has begun: what does not look like one within so many is none.
MAX_BEGUN_CHARS = 1024


def new_call_id() -> str:
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"


class CallParser:
    """Find calls in an answer's text, as it streams in. What is no call stays content.

    The line break before a call belongs to neither: templates write it when the call is sent back.
    So does the white space between calls, and around those that stand alone.
    """

    def __init__(
        self,
        tools: tuple[Tool, ...],
        form: ToolFormat,
        max_calls: int | None,
        new_id: Callable[[], str] = new_call_id,
        remember: Remember | None = None,
        *,
        begun_content: str = "",
    ) -> None:
        """max_calls: nothing is read behind so many. remember: called with every whole call.
        begun_content: what the answer has begun with."""
        self.calls = 0
        """Calls that are complete."""
        self._tools = tools
        self._form = form
        self._max_calls = max_calls
        self._new_id = new_id
        self._remember = remember
        self._opening = OPENING[form]
        self._call: HermesCall | XmlCall | None = None
        self._opener = ""
        self._record = CallRecord("")
        self._held = ""
        self._space = ""
        """White space before the call that is being read."""
        self._has_content = bool(begun_content.strip())
        """Whether there was content, but for white space, since the last call."""
        self._begins_line = not begun_content or (
            form is ToolFormat.XML and begun_content.endswith("\n")
        )
        """Whether the text that is held is the beginning of a line."""

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends within what may be a call."""
        return self._call is not None

    @property
    def done(self) -> bool:
        """Whether nothing more is read."""
        return self.calls == self._max_calls

    @property
    def ended_with_calls(self) -> bool:
        """Once the answer has ended: whether there are calls, and the last one is complete."""
        return self.done or (self.calls > 0 and self._call is None)

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text, and return the pieces that are certain now, in order."""
        self._held += text
        return self._advance(final=False)

    def flush(self, *, cut: bool = False) -> list[AnswerPiece]:
        """Return the other pieces, when the answer ends. cut: whether the model would go on."""
        return self._advance(final=True, cut=cut)

    def _advance(self, *, final: bool, cut: bool = True) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        while not self.done:
            if self._call is None:
                pieces += self._take_text(final)
            if self._call is None:
                break
            pieces += self._take_call(self._call, final, cut)
            if self._call is not None:
                break
        return pieces

    def _take_text(self, final: bool) -> list[AnswerPiece]:
        """Return content up to a call, or all that is certain."""
        found = first_opening(self._opening, self._held, self._begins_line)
        if found is not None:
            place, self._opener = found.start(1), found[1]
            text = self._before_a_call(self._held[:place])
            self._space = self._held[len(text) : place]
            self._held = self._held[place + len(self._opener) :]
            self._call, self._record = self._new_call(), CallRecord(self._opener)
            return self._content(text)
        text = self._held
        if not final:
            keep = longest_beginning(text, *OPENERS)
            text = self._before_a_call(text[: len(text) - keep])
        self._held = self._held[len(text) :]
        return self._content(text)

    def _take_call(self, call: HermesCall | XmlCall, final: bool, cut: bool) -> list[AnswerPiece]:
        fed, self._held = self._held, ""
        pieces = call.feed(fed)
        if final and call.rest is None:
            pieces += call.flush(cut=cut)
        self._record.add(fed, pieces)
        if call.complete and self.calls + 1 == self._max_calls:
            self._tell(call.unread if call.rest is None else call.rest, call.closing)
            self.calls += 1
        elif call.rest is not None:
            self._call, self._held = None, call.rest
            if call.started:
                self._tell(call.rest, "")
                self.calls += 1
                self._has_content, self._begins_line = False, True
            else:
                pieces += self._content(self._space + self._opener)
                self._begins_line = False
        return pieces

    def _tell(self, behind: str, closing: str) -> None:
        if self._remember is not None:
            call = self._record.call(behind, closing)
            if call is not None:
                self._remember(call)

    def _new_call(self) -> HermesCall | XmlCall:
        if self._form is ToolFormat.XML:
            return XmlCall(self.calls, self._new_id, self._tools, self._opener)
        return HermesCall(self.calls, self._new_id, self._tools, self._form)

    def _before_a_call(self, text: str) -> str:
        """Return text without the white space at its end that belongs to a call, if one follows."""
        return text.removesuffix("\n") if self._has_content or text.strip() else ""

    def _content(self, text: str) -> list[AnswerPiece]:
        if self.calls and not self._has_content:
            text = text.lstrip()
        self._has_content = self._has_content or bool(text.strip())
        # A line break at the end of what is certain is held back.
        self._begins_line = self._begins_line and not text
        return [TextPiece(Channel.CONTENT, text)] if text else []


def first_opening(form: re.Pattern[str], text: str, begins_line: bool) -> re.Match[str] | None:
    """Return the first place where a call may begin. form: of ``OPENING``. begins_line: whether the
    text is the beginning of a line."""
    openings = form.finditer(text)
    return next((o for o in openings if o[1] == CALL_OPEN or o.start() or begins_line), None)


def ends_in_call(text: str, tools: tuple[Tool, ...], form: ToolFormat) -> bool:
    """Return whether a text ends within what may be a call. Only the last opening tag and a little
    of what follows it are read: it is the client's text, and may be long."""
    *_, last = (0, *(each.start(1) for each in OPENING[form].finditer(text)))
    parser = CallParser(tools, form, None)
    if CALL_CLOSE not in text[last:]:
        parser.feed(text[last : last + MAX_BEGUN_CHARS])
    return parser.is_in_call


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
