"""Set a value in JSON with comments, and leave every other character as it is.

Editors' settings have comments and commas at the end of lists; a parser would lose the comments.
"""

import json
import re
from typing import Any

# What may stand between two tokens.
BLANK = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
WORD = re.compile(r"[^\s,\]}\[{:\"/]+")
INDENT = "  "
MAX_DEPTH = 200


class NotJsonError(ValueError):
    """The text is no JSON, with comments or without."""


class Text:
    """JSON with comments, of which one member at a time is found."""

    def __init__(self, text: str) -> None:
        """text: an object; nothing but blanks and comments is an empty one."""
        self.text = text

    def members(self, begin: int) -> dict[str, tuple[int, int]]:
        """Return where the values of an object begin and end. begin: its brace, or a blank before
        it. Raises NotJsonError."""
        found: dict[str, tuple[int, int]] = {}
        place = self._expect("{", self._skip(begin))
        while not self.text.startswith("}", place):
            name = STRING.match(self.text, place)
            if name is None:
                raise self._error(place)
            value = self._skip(self._expect(":", self._skip(name.end())))
            end = self._end_of_value(value, 0)
            try:
                found[json.loads(name[0], strict=False)] = (value, end)
            except ValueError as error:
                raise self._error(place) from error
            place = self._after_value(end, "}")
        return found

    def whole(self) -> int:
        """Return where the object begins. Raises NotJsonError where it is none, or not alone."""
        begin = self._skip(0)
        if begin < len(self.text) and self._skip(self._end_of_value(begin, 0)) < len(self.text):
            raise self._error(self._skip(self._end_of_value(begin, 0)))
        return begin

    def _end_of_value(self, place: int, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise self._error(place)
        opened = self.text[place : place + 1]
        if opened == '"':
            string = STRING.match(self.text, place)
            if string is None:
                raise self._error(place)
            return string.end()
        if opened not in ("{", "["):
            word = WORD.match(self.text, place)
            if word is None:
                raise self._error(place)
            return word.end()
        closing = "}" if opened == "{" else "]"
        place = self._skip(place + 1)
        while not self.text.startswith(closing, place):
            end = self._end_of_value(place, depth + 1)
            if opened == "{":
                value = self._skip(self._expect(":", self._skip(end)))
                end = self._end_of_value(value, depth + 1)
            place = self._after_value(end, closing)
        return place + 1

    def _after_value(self, end: int, closing: str) -> int:
        """Return where the next member begins, or the object's end is."""
        place = self._skip(end)
        if self.text.startswith(closing, place):
            return place
        return self._expect(",", place)

    def _expect(self, sign: str, place: int) -> int:
        if not self.text.startswith(sign, place):
            raise self._error(place)
        return self._skip(place + 1)

    def _skip(self, place: int) -> int:
        blank = BLANK.match(self.text, place)
        assert blank is not None
        return blank.end()

    def _error(self, place: int) -> NotJsonError:
        return NotJsonError(f"line {1 + self.text.count(chr(10), 0, place)} is no JSON")


def set_member(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return the text with the value at a path of names; objects that are missing are made.
    Raises NotJsonError."""
    json_text = Text(text)
    begin = json_text.whole()
    if begin == len(text):
        return f"{text}{_written(_nested(path, value), 0)}\n"
    for depth, name in enumerate(path):
        members = json_text.members(begin)
        if name not in members:
            rest = f"{INDENT * (depth + 1)}{json.dumps(name)}: "
            rest += _written(_nested(path[depth + 1 :], value), depth + 1)
            comma = "," if members else ""
            return f"{text[: begin + 1]}\n{rest}{comma}{text[begin + 1 :]}"
        begin, end = members[name]
        if depth == len(path) - 1 or text[begin] != "{":
            new = _written(_nested(path[depth + 1 :], value), depth + 1)
            return f"{text[:begin]}{new}{text[end:]}"
    raise AssertionError("a path has names")


def has_member(text: str, path: tuple[str, ...]) -> bool:
    """Return whether there is a value at a path of names. Raises NotJsonError."""
    json_text = Text(text)
    begin = json_text.whole()
    for name in path:
        if begin == len(text) or text[begin] != "{":
            return False
        members = json_text.members(begin)
        if name not in members:
            return False
        begin = members[name][0]
    return True


def _nested(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _written(value: Any, depth: int) -> str:
    lines = json.dumps(value, indent=len(INDENT), ensure_ascii=False).splitlines()
    return f"\n{INDENT * depth}".join(lines)
