"""Split content into text and calls."""

import secrets
from collections.abc import Callable

from server.text.beginnings import longest_beginning
from server.text.calls.hermes import HermesCall
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN, ToolFormat
from server.text.calls.written import CallRecord, Remember
from server.text.calls.xml import XmlCall
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, Channel, TextPiece

CALL_ID_BYTES = 12
# Of a call that a client has begun: what does not look like one within so many is none.
MAX_BEGUN_CHARS = 1024


def new_call_id() -> str:
    """Make an id that no other call has."""
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"


def openers(form: ToolFormat) -> list[str]:
    """Return the tags that calls begin with."""
    return [CALL_OPEN, FUNCTION_OPEN] if form is ToolFormat.XML else [CALL_OPEN]


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
        self._openers = openers(form)
        self._call: HermesCall | XmlCall | None = None
        self._opener = ""
        self._record = CallRecord("")
        self._held = ""
        self._space = ""
        """White space before the call that is being read."""
        self._has_content = bool(begun_content.strip())
        """Whether there was content, but for white space, since the last call."""

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

    def flush(self) -> list[AnswerPiece]:
        """Return the other pieces, when the answer ends."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        while not self.done:
            if self._call is None:
                pieces += self._take_text(final)
            if self._call is None:
                break
            pieces += self._take_call(self._call, final)
            if self._call is not None:
                break
        return pieces

    def _take_text(self, final: bool) -> list[AnswerPiece]:
        """Return content up to a call, or all that is certain."""
        places = [(self._held.find(opener), opener) for opener in self._openers]
        found = [(place, opener) for place, opener in places if place >= 0]
        if found:
            place, self._opener = min(found)
            text = self._before_a_call(self._held[:place])
            self._space = self._held[len(text) : place]
            self._held = self._held[place + len(self._opener) :]
            self._call, self._record = self._new_call(), CallRecord(self._opener)
            return self._content(text)
        text = self._held
        if not final:
            keep = longest_beginning(text, *self._openers)
            text = self._before_a_call(text[: len(text) - keep])
        self._held = self._held[len(text) :]
        return self._content(text)

    def _take_call(self, call: HermesCall | XmlCall, final: bool) -> list[AnswerPiece]:
        fed, self._held = self._held, ""
        pieces = call.feed(fed)
        if final and call.rest is None:
            pieces += call.flush()
        self._record.add(fed, pieces)
        if call.complete and self.calls + 1 == self._max_calls:
            self._tell(call.unread if call.rest is None else call.rest, call.closing)
            self.calls += 1
        elif call.rest is not None:
            self._call, self._held = None, call.rest
            if call.started:
                self._tell(call.rest, "")
                self.calls += 1
                self._has_content = False
            else:
                pieces += self._content(self._space + self._opener)
        return pieces

    def _tell(self, behind: str, closing: str) -> None:
        """Have the call remembered, if it is whole."""
        if self._remember is not None:
            call = self._record.call(behind, closing)
            if call is not None:
                self._remember(call)

    def _new_call(self) -> HermesCall | XmlCall:
        if self._form is ToolFormat.HERMES:
            return HermesCall(self.calls, self._new_id)
        return XmlCall(self.calls, self._new_id, self._tools, self._opener)

    def _before_a_call(self, text: str) -> str:
        """Return text without the white space at its end that belongs to a call, if one follows."""
        return text.removesuffix("\n") if self._has_content or text.strip() else ""

    def _content(self, text: str) -> list[AnswerPiece]:
        if self.calls and not self._has_content:
            text = text.lstrip()
        self._has_content = self._has_content or bool(text.strip())
        return [TextPiece(Channel.CONTENT, text)] if text else []


def ends_in_call(text: str, tools: tuple[Tool, ...], form: ToolFormat) -> bool:
    """Return whether a text ends within what may be a call. Only the last opening tag and a little
    of what follows it are read: it is the client's text, and may be long."""
    last = text[max(0, *map(text.rfind, openers(form))) :]
    parser = CallParser(tools, form, None)
    if CALL_CLOSE not in last:
        parser.feed(last[:MAX_BEGUN_CHARS])
    return parser.is_in_call
