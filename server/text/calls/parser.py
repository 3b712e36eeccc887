"""Split an answer's content into text and tool calls."""

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
# A client may begin an answer with an unfinished call, which is recognised up to this length.
MAX_BEGUN_CHARS = 1024


def new_call_id() -> str:
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"


class CallParser:
    """Finds calls in an answer's text as the text streams in. Other text is content. White space
    between calls, and the line break that templates write before a call, are dropped."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        tool_format: ToolFormat,
        max_calls: int | None,
        new_id: Callable[[], str] = new_call_id,
        remember: Remember | None = None,
        *,
        begun_content: str = "",
    ) -> None:
        """The answer ends after ``max_calls`` calls. ``remember`` stores complete calls.
        ``begun_content`` is the client's text at the beginning of the content."""
        self.calls = 0
        """The number of complete calls up to now."""
        self._tools = tools
        self._tool_format = tool_format
        self._max_calls = max_calls
        self._new_id = new_id
        self._remember = remember
        self._opening = OPENING[tool_format]
        self._call: HermesCall | XmlCall | None = None
        self._opener = ""
        self._record = CallRecord("")
        self._held = ""
        self._space = ""
        self._has_content = bool(begun_content.strip())
        """True if the content since the last call has more than white space."""
        self._begins_line = not begun_content or (
            tool_format is ToolFormat.XML and begun_content.endswith("\n")
        )
        """True if the text that is held back begins a line."""

    @property
    def is_in_call(self) -> bool:
        """True if the text that was fed ends within a possible call."""
        return self._call is not None

    @property
    def done(self) -> bool:
        return self.calls == self._max_calls

    @property
    def ended_with_calls(self) -> bool:
        """At the answer's end, True if the answer has calls and the last call is complete."""
        return self.done or (self.calls > 0 and self._call is None)

    def feed(self, text: str) -> list[AnswerPiece]:
        self._held += text
        return self._advance(final=False)

    def flush(self, *, cut: bool = False) -> list[AnswerPiece]:
        """Return the last pieces of the answer. ``cut`` is True if the answer was cut off."""
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
        """Take text up to the next call. Return content that later text cannot change."""
        opening = first_opening(self._opening, self._held, self._begins_line)
        if opening is not None:
            place, self._opener = opening.start(1), opening[1]
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
        if self._tool_format is ToolFormat.XML:
            return XmlCall(self.calls, self._new_id, self._tools, self._opener)
        return HermesCall(self.calls, self._new_id, self._tools, self._tool_format)

    def _before_a_call(self, text: str) -> str:
        """Return the text without white space at the end that belongs to the next call."""
        return text.removesuffix("\n") if self._has_content or text.strip() else ""

    def _content(self, text: str) -> list[AnswerPiece]:
        if self.calls and not self._has_content:
            text = text.lstrip()
        self._has_content = self._has_content or bool(text.strip())
        # Text that is sent never ends with a line break, so no new line begins after sent text.
        self._begins_line = self._begins_line and not text
        return [TextPiece(Channel.CONTENT, text)] if text else []


def first_opening(opening: re.Pattern[str], text: str, begins_line: bool) -> re.Match[str] | None:
    """Return the first match of ``opening`` at which a call may begin. An opening tag other than
    CALL_OPEN must begin a line."""
    openings = opening.finditer(text)
    return next((o for o in openings if o[1] == CALL_OPEN or o.start() or begins_line), None)


def ends_in_call(text: str, tools: tuple[Tool, ...], tool_format: ToolFormat) -> bool:
    """Return True if a text ends within a possible call. Texts may be long, so the search reads
    only the last opening tag and ``MAX_BEGUN_CHARS`` after it."""
    *_, last = (0, *(each.start(1) for each in OPENING[tool_format].finditer(text)))
    parser = CallParser(tools, tool_format, None)
    if CALL_CLOSE not in text[last:]:
        parser.feed(text[last : last + MAX_BEGUN_CHARS])
    return parser.is_in_call


class ThoughtCalls:
    """Holds back the end of the reasoning if it may be calls, which some models write there."""

    def __init__(self, tools: tuple[Tool, ...], tool_format: ToolFormat) -> None:
        self._tools = tools
        self._tool_format = tool_format
        self._held = ""
        self._begins_line = True
        self._trial: CallParser | None = None
        """Parses the text that is held back, from the opening tag of a call on."""

    def feed(self, text: str) -> str:
        """Take in reasoning. Return the part that cannot belong to calls at the reasoning's end."""
        self._held += text
        certain = ""
        while True:
            if self._trial is None:
                opening = first_opening(OPENING[self._tool_format], self._held, self._begins_line)
                end = len(self._held) - longest_beginning(self._held, *OPENERS)
                end = end if opening is None else opening.start(1)
                certain += self._taken(len(self._held[:end].rstrip()))
                if opening is None:
                    return certain
                self._trial, text = CallParser(self._tools, self._tool_format, None), self._held
            if not _says(self._trial.feed(text)):
                return certain
            # This tag does not begin a call, but a later tag may begin a call.
            self._trial = None
            certain += self._taken(len(self._held) - len(self._held.lstrip()) + 1)

    def flush(self, *, cut: bool) -> tuple[str, str]:
        """Return the rest of the reasoning, and the text of calls at the reasoning's end. If the
        answer was cut off (``cut``), the text of calls is empty."""
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
