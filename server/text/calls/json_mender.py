"""The JSON object that a model writes, made valid as it streams in.

What is valid comes out as it went in. Mended are the slips that models make: line breaks and odd
escapes within strings, quotes of Python's, words that JSON does not have, commas and colons that
are missing or there once too often, and brackets that are.
"""

import json
import re
from enum import Enum, auto

from server.text.calls.argument_types import as_json

BRACKETS = {"{": "}", "[": "]"}
BLANKS = " \t\r\n"
PUNCTUATION = frozenset(BLANKS + '"{}[]:,')
WORD_TYPES = frozenset({"null", "boolean", "integer", "number"})
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


class Next(Enum):
    """What has to follow."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonMender:
    """Take an object in character by character."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        """Brackets that close those that are open."""
        self._next = Next.VALUE
        self._held = ""
        """A comma and what is blank behind it, until another value follows."""
        self._word = ""
        """A value that is neither a string nor a bracket, as far as it has come."""
        self._quote = ""
        """What ends the string that is open."""
        self._escape = ""
        """An escape within it, as far as it has come."""

    @property
    def in_string(self) -> bool:
        """Whether a string is open."""
        return bool(self._quote)

    @property
    def is_whole(self) -> bool:
        """Whether the object has ended."""
        return self._next is Next.COMMA and not self._closing and not self._word

    @property
    def unread(self) -> str:
        """What has come and is not certain."""
        return self._held + self._escape + self._word

    def feed(self, character: str) -> str:
        """Take in a character of an object that has not ended. Return what is certain now."""
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
        """Return what the object lacks."""
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
        """What the innermost bracket begins with, and goes on with behind a comma."""
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
        """Return what has to stand before a value. is_string: so that it can be a key."""
        text, self._held = self._held, ""
        if self._next is Next.COMMA:
            text, self._next = ",", self._first
        if self._next is Next.KEY and not is_string:
            text, self._next = f'{text}""', Next.COLON
        if self._next is Next.COLON:
            text, self._next = f"{text}:", Next.VALUE
        return text

    def _missing_value(self) -> str:
        """Return the value that a key lacks."""
        colon = ":" if self._next is Next.COLON else ""
        if self._next in (Next.KEY, Next.COMMA) or self._first is Next.VALUE:
            return ""
        self._next = Next.COMMA
        return f"{colon}null"

    def _close(self) -> str:
        """Close the innermost bracket. A comma behind its last value is left out."""
        text = self._missing_value()
        self._held, self._next = "", Next.COMMA
        return text + self._closing.pop()
