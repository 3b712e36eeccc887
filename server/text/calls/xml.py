"""Read calls in Qwen3-Coder's format, which writes values without quotes::

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
from collections.abc import Container
from enum import Enum

from server.text.calls.argument_types import STRING, argument_types, as_json
from server.text.calls.tool_format import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_OPEN,
    is_called,
    new_call_id,
)
from server.text.conversation import Tool
from server.text.pieces import AnswerPiece, ToolCallArguments, ToolCallStart

FUNCTION_CLOSE, PARAMETER_OPEN = "</function>", "<parameter="
# Models also write </parameter/> and </parameter=name> as closing tags.
TAG = re.compile(
    r"(?P<close></parameter[ \t]*(?:=[^<>\n]*)?/?>)"
    r"|<parameter=(?P<parameter>[ \t]*[^<>\s][^<>\n]*)>"
    rf"|<function=(?P<function>[^<>\n]+)>|{FUNCTION_CLOSE}|{CALL_CLOSE}"
)
NAMED_TAGS = ("</parameter", PARAMETER_OPEN, FUNCTION_OPEN)
TAGS = (*NAMED_TAGS, FUNCTION_CLOSE, CALL_CLOSE)
FOLLOWING = (PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN)
NEXT = re.compile(r"\s*((?s:.{0,12}))")
LINE_END = re.compile(r"[ \t\r]*\n")


class ParameterValue:
    """Reads a parameter's value as it streams in. The value ends at a ``</parameter>`` on its own
    line or before another tag of the call. Any other ``</parameter>`` belongs to the value. Without
    a closing tag, the value ends at the next parameter or at the end of the call."""

    def __init__(self, parameters: Container[str], tools: Container[str]) -> None:
        """``parameters`` are the names of the tool's parameters, ``tools`` those of all tools."""
        self.rest: str | None = None
        """The text after the value. It is None while the value is open."""
        self._parameters = parameters
        self._tools = tools
        self._held = ""
        self._is_block: bool | None = None
        """True if the value begins on a line of its own. It is None before the first character."""
        self._has_sent = False
        self._searched = 0
        """Index in the held-back text at which the search for tags continues."""
        self._unclosed: tuple[int, int] | None = None
        """The indices of the value's end and the text after it, used if no closing tag follows."""

    def feed(self, text: str) -> str:
        """Take in text. Return the part of the value that later text cannot change."""
        self._held += text
        if self._is_block is None and self._held:
            self._is_block = self._held.startswith("\n")
            self._held = self._held.removeprefix("\n")
        end = self._find_end(final=False)
        if end is not None:
            return self._end_at(*end)
        if self._unclosed is not None:
            return ""
        # Hold back a line break and indentation at the end, because a tag may follow.
        text = self._held[: self._searched].rstrip(" \t").removesuffix("\n")
        self._held = self._held[len(text) :]
        self._searched -= len(text)
        self._has_sent = self._has_sent or bool(text)
        return text

    def finish(self, *, cut: bool) -> str:
        """Return the value's remaining text. ``cut`` is True if the answer was cut off."""
        end = self._find_end(final=True) or self._unclosed
        if end is None and cut:
            return self._held
        return self._end_at(*(end or (len(self._held), len(self._held))))

    def _end_at(self, end: int, rest: int) -> str:
        self.rest = self._held[rest:]
        return self._held[:end].removesuffix("\n")

    def _find_end(self, *, final: bool) -> tuple[int, int] | None:
        """Return the indices of the value's end and of the text after it, or None if not found."""
        held = self._held
        for tag in TAG.finditer(held, self._searched):
            start = tag.start()
            line = held.rfind("\n", 0, start) + 1
            begins_line = not held[line:start].strip(" \t") and (line > 0 or not self._has_sent)
            end = line if begins_line else start, start
            following = NEXT.match(held, tag.end())
            after = following[1] if following else ""
            is_last = after.startswith(FOLLOWING) or (final and not after)
            if tag["close"]:
                if is_last or (begins_line and LINE_END.match(held, tag.end())):
                    return start, tag.end()
            elif name := tag["parameter"]:
                if begins_line or (not self._is_block and name.strip() in self._parameters):
                    return end
                continue
            elif (name := tag["function"]) or self._unclosed is not None:
                if name and name.strip() in self._tools and self._unclosed is not None:
                    return self._unclosed
                continue
            elif begins_line or is_last:
                self._unclosed = end
                continue
            if not final and any(each.startswith(after) for each in FOLLOWING):
                self._searched = start
                return None
        place = held.rfind("<", self._searched)
        self._searched = place if place >= 0 and _may_be_tag(held[place:]) else len(held)
        return None


def _may_be_tag(text: str) -> bool:
    is_named = text.startswith(NAMED_TAGS) and not {">", "\n"} & set(text)
    return is_named or any(each.startswith(text) for each in TAGS)


NAME = re.compile(r"[^<>\n]*")
# A longer string is sent in parts, before the string is complete.
MAX_HELD_CHARS = 128


class Stage(Enum):
    """The part of a call that is being read."""

    HEAD = 0
    BETWEEN = 1
    VALUE = 2
    TAIL = 3


class XmlCall:
    """Reads a call from the text after an opening tag. Writes the arguments as JSON of the types in
    the tool's schema. Long strings are sent as they stream in. Other values are sent at the call's
    end, because a later value with the same name replaces them."""

    def __init__(self, index: int, tools: tuple[Tool, ...], opener: str) -> None:
        self.rest: str | None = None
        """The text after the call, or all text if there is no call. It is None while undecided."""
        self._index = index
        self._offered = tools
        self._tools = {tool.name: tool.parameters for tool in tools}
        self._prefix = "" if opener == CALL_OPEN else opener
        self.unread = self._prefix
        self._stage = Stage.HEAD
        self._schema: dict[str, object] | None = None
        self._is_closed = False
        self._waiting: dict[str, str] = {}
        """The JSON of each value that has not been sent yet, by parameter name."""
        self._separator = ""
        self._name = ""
        self._types: frozenset[str] = STRING
        self._value = ParameterValue((), ())
        self._text = ""
        """The text of the open value that has not been sent yet."""
        self._is_sent = False
        """True if the open value is sent as it streams in."""

    @property
    def started(self) -> bool:
        return self._stage is not Stage.HEAD

    @property
    def complete(self) -> bool:
        return self._stage is Stage.TAIL

    @property
    def closing(self) -> str:
        """The text that closes a call after its arguments, or "" if ``</function>`` is missing."""
        return f"\n{CALL_CLOSE}" if self._is_closed else ""

    def feed(self, text: str) -> list[AnswerPiece]:
        self.unread += text
        pieces: list[AnswerPiece] = []
        stage = None
        while stage is not self._stage and self.rest is None:
            stage = self._stage
            pieces += self._advance()
        return pieces

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        if self._stage is Stage.VALUE:
            pieces = self._add(self._value.finish(cut=cut)) + self.feed("")
        if self._stage is Stage.HEAD:
            self.rest = self.unread[len(self._prefix) :]
        elif self._stage is Stage.VALUE and not self._is_sent:
            begun = json.dumps(self._text, ensure_ascii=False)[:-1] if self._types == STRING else ""
            pieces += self._json(self._fields() + self._key(self._name) + begun)
        elif self._stage is Stage.BETWEEN:
            pieces += self._json(self._fields()) if cut else self._end()
        if self._stage is Stage.TAIL:
            self.rest = self.rest or ""
        return pieces

    def _advance(self) -> list[AnswerPiece]:
        if self._stage is Stage.HEAD:
            return self._take_head()
        if self._stage is Stage.BETWEEN:
            return self._take_between()
        if self._stage is Stage.TAIL:
            return self._take_tail()
        held, self.unread = self.unread, ""
        return self._add(self._value.feed(held))

    def _take_head(self) -> list[AnswerPiece]:
        """Read the call's name. A parameter or the call's end must follow the name."""
        name, rest = _named(self.unread.lstrip(), FUNCTION_OPEN) or ("", "")
        if rest is None:
            return []
        after = rest.lstrip()
        parameter = _named(after, PARAMETER_OPEN)
        closes = (FUNCTION_CLOSE,) if self._prefix else (FUNCTION_CLOSE, CALL_CLOSE)
        is_open = parameter is not None or any(each.startswith(after) for each in closes)
        is_call = after.startswith(closes) or (parameter is not None and parameter[1] is not None)
        named = name in self._tools if self._prefix else is_called(name, self._offered)
        if not named or not (is_open or is_call):
            self.rest = self.unread[len(self._prefix) :]
        if self.rest is not None or not is_call:
            return []
        self.unread, self._stage = after, Stage.BETWEEN
        self._schema = self._tools.get(name)
        return [ToolCallStart(self._index, new_call_id(), name), *self._json("{")]

    def _take_between(self) -> list[AnswerPiece]:
        self.unread = self.unread.lstrip()
        parameter = _named(self.unread, PARAMETER_OPEN)
        if parameter is not None:
            name, rest = parameter
            if rest is not None:
                self._begin_parameter(name, rest)
            return []
        if self.unread.startswith(FUNCTION_CLOSE):
            self.unread = self.unread[len(FUNCTION_CLOSE) :]
            self._is_closed = True
        elif FUNCTION_CLOSE.startswith(self.unread):
            return []
        return self._end()

    def _begin_parameter(self, name: str, rest: str) -> None:
        self.unread, self._stage, self._name = rest, Stage.VALUE, name
        self._types = argument_types(self._schema, name)
        properties = (self._schema or {}).get("properties")
        names = properties if isinstance(properties, dict) else ()
        self._value = ParameterValue(names, self._tools)
        self._text, self._is_sent = "", False

    def _add(self, text: str) -> list[AnswerPiece]:
        """Add text to the open value. End the value if its ParameterValue has found the end."""
        written = ""
        if not self._is_sent:
            self._text += text
            if self._types == STRING and len(self._text) > MAX_HELD_CHARS:
                self._is_sent, text = True, self._text
                self._waiting.pop(self._name, None)
                written = f'{self._fields()}{self._key(self._name)}"'
        if self._is_sent:
            written += json.dumps(text, ensure_ascii=False)[1:-1]
        if self._value.rest is not None:
            self.unread, self._stage = self._value.rest, Stage.BETWEEN
            if self._is_sent:
                written += '"'
            else:
                self._waiting[self._name] = as_json(self._text, self._types)
        return self._json(written)

    def _end(self) -> list[AnswerPiece]:
        self._stage = Stage.TAIL
        return self._json(self._fields() + "}")

    def _fields(self) -> str:
        fields = ""
        for name, value in self._waiting.items():
            fields += self._key(name) + value
        self._waiting.clear()
        return fields

    def _key(self, name: str) -> str:
        before, self._separator = self._separator, ", "
        return f"{before}{json.dumps(name, ensure_ascii=False)}: "

    def _take_tail(self) -> list[AnswerPiece]:
        after = self.unread.lstrip()
        if after.startswith(CALL_CLOSE):
            self.rest = after[len(CALL_CLOSE) :]
        elif not CALL_CLOSE.startswith(after):
            self.rest = after
        return []

    def _json(self, text: str) -> list[AnswerPiece]:
        return [ToolCallArguments(self._index, text)] if text else []


def _named(text: str, opener: str) -> tuple[str, str | None] | None:
    """Return the name in an opening tag, and the text after the tag, which is None while the tag is
    unfinished. Return None if the text begins differently."""
    if not text.startswith(opener):
        return ("", None) if opener.startswith(text) else None
    name_match = NAME.match(text, len(opener))
    assert name_match is not None
    name, after = name_match[0].strip(), text[name_match.end() :]
    if not after:
        return name, None
    return (name, after[1:]) if name and after.startswith(">") else None
