"""One call in Qwen3-Coder's format, which writes values as they are::

<tool_call>
<function=look>
<parameter=path>
notes.txt
</parameter>
</function>
</tool_call>
"""

import json
import re
from collections.abc import Callable
from enum import Enum

from server.text.beginnings import longest_beginning
from server.text.calls.argument_types import STRING, argument_types, as_json
from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, ToolCallArguments, ToolCallStart

FUNCTION_CLOSE = "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")


class Stage(Enum):
    """Where in a call its reader is."""

    HEAD = 0
    """Before the name has ended."""
    BETWEEN = 1
    """Between two parameters."""
    STRING = 2
    """In a value that can only be a string, which is sent as it comes."""
    VALUE = 3
    """In any other value, which is sent when it is whole."""
    TAIL = 4
    """Behind the arguments."""


class XmlCall:
    """Reads what follows an opening tag, as it streams in, and writes the arguments as JSON, with
    the types that the tool's schema gives them."""

    def __init__(
        self, index: int, new_id: Callable[[], str], tools: tuple[Tool, ...], opener: str
    ) -> None:
        """opener: the tag; some models leave ``<tool_call>`` out."""
        self.rest: str | None = None
        """What follows the call, or all of it when it has turned out not to be one; None: it goes
        on."""
        self._index = index
        self._new_id = new_id
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._prefix = "" if opener == CALL_OPEN else opener
        self._held = self._prefix
        self._stage = Stage.HEAD
        self._schema: dict[str, object] | None = None
        self._types: frozenset[str] = STRING
        self._parameters = 0
        self._value_begun = False
        self._is_closed = False
        self._searched = 0
        """So much of what is held does not begin with the closing tag: it is not read again with
        every token."""

    @property
    def started(self) -> bool:
        """Whether the call has been announced."""
        return self._stage is not Stage.HEAD

    @property
    def complete(self) -> bool:
        """Whether all of the arguments are there."""
        return self._stage is Stage.TAIL

    @property
    def unread(self) -> str:
        """Text that has come and belongs to nothing yet."""
        return self._held

    @property
    def closing(self) -> str:
        """What follows arguments that are complete; "" where they did not end as they should."""
        return f"\n{CALL_CLOSE}" if self._is_closed else ""

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text, and return the pieces of the call that are certain now."""
        self._held += text
        pieces: list[AnswerPiece] = []
        stage = None
        while stage is not self._stage and self.rest is None:
            stage = self._stage
            pieces += self._advance()
        return pieces

    def flush(self) -> list[AnswerPiece]:
        """Return the other pieces, when the answer ends here: what is missing stays missing."""
        if self._stage is Stage.HEAD:
            self.rest = self._held[len(self._prefix) :]
        elif self._stage is Stage.TAIL:
            self.rest = ""
        elif self._stage is Stage.STRING:
            return self._json(_escaped(self._held))
        return []

    def _advance(self) -> list[AnswerPiece]:
        if self._stage is Stage.HEAD:
            return self._take_head()
        if self._stage is Stage.BETWEEN:
            return self._take_between()
        return self._take_tail() if self._stage is Stage.TAIL else self._take_value()

    def _take_head(self) -> list[AnswerPiece]:
        found = _named(self._held.lstrip(), FUNCTION_OPEN)
        if found is None:
            self.rest = self._held[len(self._prefix) :]
            return []
        name, rest = found
        if rest is None:
            return []
        self._held, self._stage = rest, Stage.BETWEEN
        self._schema = self._tools.get(name)
        return [ToolCallStart(self._index, self._new_id(), name), *self._json("{")]

    def _take_between(self) -> list[AnswerPiece]:
        self._held = self._held.lstrip()
        found = _named(self._held, PARAMETER_OPEN)
        if found is not None:
            name, rest = found
            return [] if rest is None else self._begin_parameter(name, rest)
        if self._held.startswith(FUNCTION_CLOSE):
            self._held = self._held[len(FUNCTION_CLOSE) :]
            self._is_closed = True
        elif FUNCTION_CLOSE.startswith(self._held):
            return []
        # Whatever else it is, it ends the call.
        self._stage = Stage.TAIL
        return self._json("}")

    def _begin_parameter(self, name: str, rest: str) -> list[AnswerPiece]:
        self._held = rest
        self._types = argument_types(self._schema, name)
        self._stage = Stage.STRING if self._types == STRING else Stage.VALUE
        self._value_begun = False
        self._searched = 0
        before = ", " if self._parameters else ""
        self._parameters += 1
        quote = '"' if self._stage is Stage.STRING else ""
        return self._json(f"{before}{json.dumps(name, ensure_ascii=False)}: {quote}")

    def _take_value(self) -> list[AnswerPiece]:
        if not self._value_begun and self._held:
            self._held = self._held.removeprefix("\n")
            self._value_begun = True
        place = self._held.find(PARAMETER_CLOSE, self._searched)
        if place >= 0:
            is_string, text = self._stage is Stage.STRING, self._held[:place].removesuffix("\n")
            self._held, self._stage = self._held[place + len(PARAMETER_CLOSE) :], Stage.BETWEEN
            return self._json(_escaped(text) + '"' if is_string else as_json(text, self._types))
        if self._stage is Stage.VALUE:
            self._searched = max(0, len(self._held) - len(PARAMETER_CLOSE))
            return []
        keep = longest_beginning(self._held, "\n" + PARAMETER_CLOSE, PARAMETER_CLOSE)
        text, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        return self._json(_escaped(text))

    def _take_tail(self) -> list[AnswerPiece]:
        after = self._held.lstrip()
        if after.startswith(CALL_CLOSE):
            self.rest = after[len(CALL_CLOSE) :]
        elif not CALL_CLOSE.startswith(after):
            self.rest = after
        return []

    def _json(self, text: str) -> list[AnswerPiece]:
        return [ToolCallArguments(self._index, text)] if text else []


def _named(text: str, opener: str) -> tuple[str, str | None] | None:
    """Return the name in a tag that begins so, and what follows the tag: None while it may go on.

    None where the text does not begin with such a tag.
    """
    if not text.startswith(opener):
        return ("", None) if opener.startswith(text) else None
    found = NAME.match(text, len(opener))
    assert found is not None
    name, after = found[0].strip(), text[found.end() :]
    if not after:
        return name, None
    return (name, after[1:]) if name and after.startswith(">") else None


def _escaped(text: str) -> str:
    """Escape the text for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
