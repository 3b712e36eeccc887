"""Marks that stand for calls while a template writes all around them."""

import secrets
from collections.abc import Callable

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN

NONCE_BYTES = 12
# What templates write between a tag and the name, and behind it where there are no arguments.
MAX_AROUND_CHARS = 64


class MarkError(ValueError):
    """A template that does more with calls than to write each between its tags, in order."""


class CallMarks:
    """A call whose text is known gets a name that stands nowhere else; what the template has made
    of it is found by that name, and replaced."""

    def __init__(self, guarded: Callable[[str], str]) -> None:
        """guarded: how a call's text goes into a prompt."""
        self._guarded = guarded
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        """Return whether there are any calls."""
        return bool(self._texts)

    def add(self, text: str) -> str:
        """Return the name that stands for a call, which must have no arguments. text: with its
        tags."""
        self._texts.append(self._guarded(text))
        return self._mark(len(self._texts) - 1)

    def replaced(self, prompt: str, *, is_whole: bool = True) -> str:
        """Replace the names in the prompt with the calls' texts. is_whole: whether all calls must
        be there, and not only the first ones. Raises MarkError."""
        calls = prompt.count(self._nonce)
        if calls > len(self._texts) or (is_whole and calls < len(self._texts)):
            raise MarkError("there are more calls, or fewer")
        parts: list[str] = []
        done = 0
        for number, text in enumerate(self._texts[:calls]):
            mark = self._mark(number)
            place = prompt.find(mark, done)
            start = prompt.rfind(CALL_OPEN, max(done, place - MAX_AROUND_CHARS), place)
            behind = place + len(mark)
            end = prompt.find(CALL_CLOSE, behind, behind + MAX_AROUND_CHARS)
            if min(place, start, end) < 0:
                raise MarkError("a call has no tags, or they are not in order")
            parts += [prompt[done:start], text]
            done = end + len(CALL_CLOSE)
        return "".join([*parts, prompt[done:]])

    def _mark(self, number: int) -> str:
        return f"call_{self._nonce}_{number}_"
