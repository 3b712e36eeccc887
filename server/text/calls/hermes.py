"""Read tool calls in JSON: ``{"name": "f", "arguments": {"x": 1}}`` in tags, or Llama's format."""

import json
import re
from enum import Enum, auto

from server.text.calls.argument_types import as_json
from server.text.calls.tool_format import CALL_CLOSE, ToolFormat, is_called, new_call_id
from server.text.conversation import Tool
from server.text.json_object import json_object
from server.text.pieces import AnswerPiece, ToolCallArguments, ToolCallStart

BRACKETS = {"{": "}", "[": "]"}
BLANKS = " \t\r\n"
PUNCTUATION = frozenset(BLANKS + '"{}[]:,')
WORD_TYPES = frozenset({"null", "boolean", "integer", "number"})
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


class Next(Enum):
    """The kind of JSON token that must come next."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonMender:
    """Repairs a model's JSON object as it streams in. Valid JSON stays unchanged.

    Repaired mistakes: line breaks and invalid escapes in strings, Python's quotes, words that JSON
    lacks, missing or doubled commas and colons, and missing brackets."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        """The brackets that will close the open brackets. The innermost bracket is last."""
        self._next = Next.VALUE
        self._held = ""
        """A comma and the blanks after it, held back until a value follows."""
        self._word = ""
        """The beginning of an unfinished number or word."""
        self._quote = ""
        """The quote that will end the open string, or "" outside strings."""
        self._escape = ""
        """The beginning of an unfinished escape in the open string."""

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    @property
    def is_whole(self) -> bool:
        return self._next is Next.COMMA and not self._closing and not self._word

    @property
    def unread(self) -> str:
        """The end of the input, whose repaired form is not certain yet."""
        return self._held + self._escape + self._word

    def feed(self, character: str) -> str:
        """Take in the next character. Return the repaired text that is certain from now on."""
        if self._quote:
            return self._in_string(character)
        if character not in PUNCTUATION and (character != "'" or self._word):
            self._word += character
            return ""
        text = self._take_word()
        if character in BLANKS:
            if not self._held:
                return text + character
            self._held += character
        elif character in "\"'":
            text += self._begin_value(is_string=True) + '"'
            self._quote = character
        elif character in BRACKETS:
            text += self._begin_value(is_string=False) + character
            self._closing.append(BRACKETS[character])
            self._next = Next.KEY if character == "{" else Next.VALUE
        elif character in self._closing:
            closed = False
            while not closed:
                closed = self._closing[-1] == character
                text += self._close()
        elif character == ":" and self._next is Next.COLON:
            text += character
            self._next = Next.VALUE
        elif character == ",":
            text += self._missing_value()
            if self._next is Next.COMMA:
                self._held, self._next = character, self._first
        return text

    def end(self) -> str:
        """Close the object and return the text that was missing."""
        text = ""
        if self._quote:
            text = self._in_string(" ").removesuffix(" ") if self._escape else ""
            text += self._in_string(self._quote)
        text += self._take_word()
        while self._closing:
            text += self._close()
        return text

    @property
    def _first(self) -> Next:
        """The kind of JSON token that begins each member in the innermost bracket."""
        return Next.KEY if self._closing[-1] == "}" else Next.VALUE

    def _in_string(self, character: str) -> str:
        if self._escape or character == "\\":
            self._escape += character
            if ESCAPE.fullmatch(self._escape):
                text, self._escape = self._escape, ""
                return text
            if BEGUN_ESCAPE.fullmatch(self._escape):
                return ""
            begun, self._escape = self._escape[:-1], ""
            if (begun, character) == ("\\", "'"):
                return character
            return f"\\{begun}" + self._in_string(character)
        if character == self._quote:
            self._quote = ""
            self._next = Next.COLON if self._next is Next.KEY else Next.COMMA
            return '"'
        return json.dumps(character)[1:-1] if character < " " or character == '"' else character

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        text = self._begin_value(is_string=True)
        if self._next is Next.KEY:
            self._next = Next.COLON
            return text + json.dumps(word, ensure_ascii=False)
        self._next = Next.COMMA
        return text + as_json(word, WORD_TYPES)

    def _begin_value(self, *, is_string: bool) -> str:
        """Return the missing punctuation before a value. A string (``is_string``) may be a key."""
        text, self._held = self._held, ""
        if self._next is Next.COMMA:
            text, self._next = ",", self._first
        if self._next is Next.KEY and not is_string:
            text, self._next = f'{text}""', Next.COLON
        if self._next is Next.COLON:
            text, self._next = f"{text}:", Next.VALUE
        return text

    def _missing_value(self) -> str:
        """Return ``null``, with a colon if needed, if the last key has no value."""
        colon = ":" if self._next is Next.COLON else ""
        if self._next in (Next.KEY, Next.COMMA) or self._first is Next.VALUE:
            return ""
        self._next = Next.COMMA
        return f"{colon}null"

    def _close(self) -> str:
        """Return the text that closes the innermost bracket. A trailing comma is dropped."""
        text = self._missing_value()
        self._held, self._next = "", Next.COMMA
        return text + self._closing.pop()


# Keys that models use for a call's arguments. The first key is the usual key.
ARGUMENTS = ("arguments", "parameters", "args", "input")
BESIDES = {"name", "type", "id"}
# A name must not contain "<", so that no part of a closing tag is read as a name.
NAMED = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\<\x00-\x1f]+)"'
NAME = re.compile(NAMED)
# If a call begins like this, the arguments are sent as they stream in.
HEAD = re.compile(NAMED + r'\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
NO_CALL = {
    ToolFormat.HERMES: re.compile(r"\s*[^\s{]"),
    # JSON whose first key is no key of a call is an ordinary answer, and is sent at once.
    ToolFormat.LLAMA: re.compile(
        rf'\s*(?:[^\s{{]|\{{\s*(?:[^\s"]|"(?!(?:name|type|{"|".join(ARGUMENTS)})")[^"]*"))'
    ),
}
ENDS = {ToolFormat.HERMES: CALL_CLOSE, ToolFormat.LLAMA: ";"}
# If the text before the arguments is longer, the call is parsed only when it is complete.
MAX_HEAD_CHARS = 1024
# Matches closing brackets and further fields after the arguments.
FILLING = re.compile(r'\s*(?:,\s*(?:"[^<]*|$))?[\s}]*')


class HermesCall:
    """Reads a call in JSON from the text after an opening tag. The repaired arguments are sent as
    they stream in. A call with an unusual order of keys is sent when the call is complete."""

    def __init__(
        self, index: int, tools: tuple[Tool, ...], tool_format: ToolFormat = ToolFormat.HERMES
    ) -> None:
        self.started = False
        self.complete = False
        """True if all arguments have been read."""
        self.rest: str | None = None
        """The text after the call, or all text if there is no call. It is None while undecided."""
        self._index = index
        self._tools = tools
        self._tool_format = tool_format
        self._end = ENDS[tool_format]
        self.unread = ""
        """Text that is not yet assigned to the name, the arguments or ``rest``."""
        self._searched = 0
        """The number of leading characters of ``unread`` in which no closing tag begins."""
        self._json = JsonMender()

    @property
    def closing(self) -> str:
        """The text that closes a call after its arguments, or "" if the format has none."""
        return f"}}\n{CALL_CLOSE}" if self._end == CALL_CLOSE else ""

    def feed(self, text: str) -> list[AnswerPiece]:
        self.unread += text
        pieces: list[AnswerPiece] = []
        if not self.started:
            pieces += self._take_head()
        if self.started and not self.complete:
            pieces += self._take_arguments()
        if self.complete and self.rest is None:
            self._take_tail()
        return pieces

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the last pieces. If the answer was cut off (``cut``), repair no arguments."""
        if not self.started:
            return self._take_whole(self.unread, "")
        if self.complete:
            self.rest = ""
            return []
        if cut:
            return self._arguments(self._json.unread + self.unread)
        return self._arguments(self._json.end())

    def _take_head(self) -> list[AnswerPiece]:
        name = NAME.match(self.unread, 0, MAX_HEAD_CHARS)
        is_other = name is not None and not is_called(name[1], self._tools)
        if is_other or NO_CALL[self._tool_format].match(self.unread, 0, MAX_HEAD_CHARS):
            self.rest = self.unread
            return []
        head = HEAD.match(self.unread, 0, MAX_HEAD_CHARS)
        # In the Hermes format, "parameters" may be a field besides "arguments".
        if head and (head[2] == ARGUMENTS[0] or self._tool_format is ToolFormat.LLAMA):
            self.unread = self.unread[head.end() :]
            return self._start(head[1])
        place = self.unread.find(CALL_CLOSE, self._searched)
        if place >= 0 and self._end == CALL_CLOSE:
            return self._take_whole(self.unread[:place], self.unread[place + len(CALL_CLOSE) :])
        self._searched = max(0, len(self.unread) - len(CALL_CLOSE))
        return []

    def _take_whole(self, text: str, rest: str) -> list[AnswerPiece]:
        call = whole_call(text)
        if call is None or not is_called(call[0], self._tools):
            self.rest = self.unread
            return []
        name, arguments = call
        self.complete, self.unread, self.rest = True, rest, rest
        return [*self._start(name), *self._arguments(arguments)]

    def _take_arguments(self) -> list[AnswerPiece]:
        """Take text up to the bracket that closes the object. A closing tag outside strings also
        closes the object, because models forget brackets."""
        text: list[str] = []
        taken = len(self.unread)
        for place, character in enumerate(self.unread):
            if character == self._end[0] and not self._json.in_string:
                after = self.unread[place:]
                self.complete = after.startswith(self._end)
                if self.complete:
                    text.append(self._json.end())
                if self.complete or self._end.startswith(after):
                    taken = place
                    break
            text.append(self._json.feed(character))
            if self._json.is_whole:
                self.complete, taken = True, place + 1
                break
        self.unread = self.unread[taken:]
        return self._arguments("".join(text))

    def _take_tail(self) -> None:
        filling = FILLING.match(self.unread)
        assert filling is not None
        after = self.unread[filling.end() :]
        if after.startswith(self._end):
            self.rest = after[len(self._end) :]
        elif not self._end.startswith(after):
            self.rest = after

    def _start(self, name: str) -> list[AnswerPiece]:
        self.started = True
        return [ToolCallStart(self._index, new_call_id(), name)]

    def _arguments(self, text: str) -> list[AnswerPiece]:
        return [ToolCallArguments(self._index, text)] if text else []


def whole_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a complete call, or None if the text is no call. The
    arguments may be an object, or its JSON in a string, or missing if no other field exists."""
    call = json_object(text) or {}
    name = call.get("name")
    arguments = next((call[key] for key in ARGUMENTS if call.get(key)), None)
    has_others = not call.keys() & {*ARGUMENTS} and call.keys() - BESIDES
    if not isinstance(name, str) or not name or has_others:
        return None
    if isinstance(arguments, str):
        arguments = json_object(arguments)
        if arguments is None:
            return None
    if not isinstance(arguments, dict | None):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)
