"""Store tool calls as models wrote them, for prompts that repeat the calls.

A client sends a call back as name and arguments, and the template writes the call anew. If the
template's text differs from the model's text, the prompt no longer matches the cached prefix. So
the model's texts of the newest calls are stored by the calls' ids."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN
from server.text.conversation import Conversation, Tool, ToolCall
from server.text.json_object import json_object
from server.text.newest import Newest

NONCE_BYTES = 12
# Number of characters before and after a mark in which the call's tags are searched.
MAX_AROUND_CHARS = 256


class MarkError(ValueError):
    """Raised if a template does not write each call between tags, or changes the order of calls."""


class CallMarks:
    """Makes marks: random names that stand for calls while a template renders. Afterwards each mark
    in the prompt, with the tags around it, is replaced by the model's own text of the call."""

    def __init__(
        self, spelled: Callable[[str], str], tags: tuple[str, str] = (CALL_OPEN, CALL_CLOSE)
    ) -> None:
        """``spelled`` is a function that returns a call's text for the prompt. ``tags`` are the
        texts with which the template begins and ends a call."""
        self._spelled = spelled
        self._open, self._close = tags
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, text: str) -> str:
        """Return a mark to use as the name of a call or of its argument. ``text`` is the model's
        text of the call."""
        self._texts.append(self._spelled(text))
        return self._mark(len(self._texts) - 1)

    def replace(self, prompt: str, *, is_whole: bool = True) -> str:
        """Replace the prompt's marks by the calls' texts. A prompt that is not ``is_whole`` may
        lack the last marks. Raises MarkError for other missing marks."""
        calls = prompt.count(self._nonce)
        if calls > len(self._texts) or (is_whole and calls < len(self._texts)):
            raise MarkError("there are more calls, or fewer")
        parts: list[str] = []
        done = 0
        for number, text in enumerate(self._texts[:calls]):
            mark = self._mark(number)
            place = prompt.find(mark, done)
            start = prompt.rfind(self._open, max(done, place - MAX_AROUND_CHARS), place)
            behind = place + len(mark)
            end = prompt.find(self._close, behind, behind + MAX_AROUND_CHARS)
            if min(place, start, end) < 0:
                raise MarkError("a call has no tags, or they are not in order")
            parts += [prompt[done:start], text]
            done = end + len(self._close)
        return "".join([*parts, prompt[done:]])

    def _mark(self, number: int) -> str:
        return f"call_{self._nonce}_{number}_"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that the served model has made."""

    id: str
    name: str
    arguments: str
    """The arguments as sent to the client."""
    text: str
    """The whole call with tags, as the model wrote it. In Harmony, signs stand for tokens."""

    @property
    def size(self) -> int:
        text = self.id + self.name + self.arguments + self.text
        return len(text.encode("utf-8", "surrogatepass"))


Remember = Callable[[WrittenCall], None]


class WrittenCalls:
    """Stores the newest calls, up to a total number of bytes.

    All API keys share the calls, because ids are random and cannot be guessed. A stranger with an
    id would also need the call's name and arguments, and would learn only how they were written."""

    def __init__(self, max_bytes: int) -> None:
        self._calls: Newest[str, WrittenCall] = Newest(max_bytes)

    def remember(self, call: WrittenCall) -> None:
        self._calls.keep(call.id, call, call.size)

    def recall(self, conversation: Conversation) -> Conversation:
        """Add the model's own text to each call of the conversation whose text is stored."""
        tools = {tool.name: tool for tool in conversation.tools}
        turns = tuple(
            replace(turn, tool_calls=tuple(self._recall(call, tools) for call in turn.tool_calls))
            for turn in conversation.turns
        )
        return replace(conversation, turns=turns)

    def _recall(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolCall:
        known = self._calls.find(call.id)
        if known is None or known.name != call.name:
            return call
        defaults = {} if call.name not in tools else defaults_of(tools[call.name])
        is_same = same_arguments(known.arguments, call.arguments, defaults)
        return replace(call, written=known.text) if is_same else call


def defaults_of(tool: Tool) -> dict[str, Any]:
    """Return the default values of a tool's arguments. Claude Code adds default values to calls
    that it sends back, such as ``replace_all: false`` to an Edit."""
    properties = (tool.parameters or {}).get("properties")
    named = properties.items() if isinstance(properties, dict) else ()
    return {name: it["default"] for name, it in named if isinstance(it, dict) and "default" in it}


def same_arguments(
    one: str, other: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return True if the texts are equal, or equal as JSON objects with ``defaults`` filled in."""
    if one == other:
        return True
    left, right = json_object(one), json_object(other)
    if left is None or right is None:
        return False
    return same_value({**defaults, **left}, {**defaults, **right})


def same_value(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal. 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
