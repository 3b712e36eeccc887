"""Keep calls as models wrote them, for prompts that repeat them.

Agents send a call back as name and arguments, and the model's template writes it anew. Where that
differs from the model's own text, the prompt leaves the cached prefix at its first call. So the
text of the newest calls is kept by id.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN
from server.text.conversation import Conversation, Tool, ToolCall
from server.text.json_object import json_object
from server.text.newest import Newest
from server.text.pieces import AnswerPiece, ToolCallArguments, ToolCallStart

NONCE_BYTES = 12
# Length of the text that templates write between a tag and the name, and behind it.
MAX_AROUND_CHARS = 64


class MarkError(ValueError):
    """A template that does more with calls than to write each between its tags, in order."""


class CallMarks:
    """Marks that stand for calls while a template renders. The template's text of a mark is found
    by its random name, and the call's own text replaces it."""

    def __init__(self, guarded: Callable[[str], str]) -> None:
        """guarded: protects special tokens in a call's text."""
        self._guarded = guarded
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, text: str) -> str:
        """Return the name that stands for a call. text: the call with its tags. The call in the
        template must have no arguments."""
        self._texts.append(self._guarded(text))
        return self._mark(len(self._texts) - 1)

    def replace(self, prompt: str, *, is_whole: bool = True) -> str:
        """Replace the marks in the prompt by the calls' texts. is_whole: whether all calls must be
        there, or only the first ones. Raises MarkError."""
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


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that this server's model has made."""

    id: str
    name: str
    arguments: str
    """As sent to the client."""
    text: str
    """As the model wrote it, with its tags."""

    @property
    def size(self) -> int:
        """Approximate bytes."""
        return len((self.id + self.name + self.arguments + self.text).encode())


Remember = Callable[[WrittenCall], None]


class CallRecord:
    """Collects one call while it is read."""

    def __init__(self, opener: str) -> None:
        """opener: the tag that it began with."""
        self._text = opener
        self._start: ToolCallStart | None = None
        self._arguments = ""

    def add(self, text: str, pieces: list[AnswerPiece]) -> None:
        """Take in text of the model, and the pieces that the parser made of it."""
        self._text += text
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._start = piece
            else:
                assert isinstance(piece, ToolCallArguments), "a call is made of nothing else"
                self._arguments += piece.text

    def call(self, behind: str, closing: str) -> WrittenCall | None:
        """Return the call; None where it is not written as calls are. behind: text that was read
        behind the call. closing: text that would follow the arguments; "" where the answer was not
        cut off there."""
        assert self._start is not None, "only a call that has begun is one"
        text = self._text[: len(self._text) - len(behind)]
        if not text.endswith(CALL_CLOSE):
            if not closing:
                return None
            text += closing
        return WrittenCall(self._start.id, self._start.name, self._arguments, text)


class WrittenCalls:
    """The newest calls, up to a number of bytes.

    API keys are not separated: ids are random and cannot be guessed. A stranger with an id would
    also need name and arguments, and would learn nothing but white space.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all calls together; 0 keeps none."""
        self._calls: Newest[str, WrittenCall] = Newest(max_bytes)

    def remember(self, call: WrittenCall) -> None:
        self._calls.keep(call.id, call, call.size)

    def recall(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the text of its calls, where it is known."""
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
    """Return the default values of a tool's arguments. Claude Code adds them to the calls that it
    sends back: an Edit gets ``replace_all: false``."""
    properties = (tool.parameters or {}).get("properties")
    named = properties.items() if isinstance(properties, dict) else ()
    return {name: it["default"] for name, it in named if isinstance(it, dict) and "default" in it}


def same_arguments(
    one: str, other: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Return whether two texts are the same object, or the same text where they are none. defaults:
    values of missing arguments."""
    if one == other:
        return True
    left, right = json_object(one), json_object(other)
    if left is None or right is None:
        return False
    return same_value({**defaults, **left}, {**defaults, **right})


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: 1 is 1.0, but not true. The order of keys does
    not count."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
