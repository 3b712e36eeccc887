"""The input items of /v1/responses: their fields, and their conversion to turns and stored JSON.

An assistant's turn arrives as several items: reasoning, text and each call. These items are merged
into one turn, so that the prompt repeats the model's output token by token."""

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from server.protocol.answers import Json
from server.protocol.chat.request import (
    NOT_CONTINUED,
    ROLES,
    CalledFunction,
    ContentPart,
    content_text,
)
from server.protocol.common import ListOf, WireModel
from server.protocol.responses.tools import FlatTool, functions, joined_name
from server.protocol.unsupported import FILES, IMAGES, Unsupported, description
from server.protocol.wire_errors import invalid
from server.text.conversation import Role, ToolCall, Turn

# Prefix of reasoning in base64, for clients that send back only encrypted reasoning.
REASONING_MARK = "quire1."
# Prefix of OpenAI's encrypted strings.
CIPHER_BEGIN = "gAAAA"
SHOWN = IMAGES | FILES


def packed_reasoning(text: str) -> str:
    return REASONING_MARK + base64.b64encode(text.encode()).decode()


def read_reasoning(packed: str) -> str | None:
    """Unpack reasoning. Return None for a string that quire did not pack."""
    if not packed.startswith(REASONING_MARK):
        return None
    try:
        return base64.b64decode(packed[len(REASONING_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class MessageItem(WireModel):
    """A message of any role."""

    type: Literal["message"] | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[ContentPart] | None = None
    prefix: bool | None = None
    """True if the next item, or the answer after the last item, continues this item."""

    def turn(self, place: str, unsupported: Unsupported) -> Turn:
        """Return the item as a Turn, which may be merged with its neighbours. Raises ApiError."""
        if self.prefix and self.role != "assistant":
            raise invalid(NOT_CONTINUED, f"{place}.prefix")
        text = content_text(self.content or "", f"{place}.content", unsupported)
        return Turn(ROLES[self.role], text)

    def stored_form(self, key: str) -> Json:
        """Return the item with all of OpenAI's fields. A missing id is made from ``key``."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        return {
            "type": "message",
            "id": self.id or f"msg_{key}",
            "role": self.role,
            "status": "completed",
            "content": _kept_content(self.content or "", kind),
            **_kept_prefix(self.prefix),
        }


class CallItem(CalledFunction):
    """A tool call that the model made."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str | None = None
    namespace: str | None = None

    def turn(self, place: str, _: Unsupported) -> Turn:
        name = joined_name(self.namespace, self.name) if self.namespace else self.name
        return Turn("assistant", tool_calls=(replace(self._call, name=name),))

    def stored_form(self, key: str) -> Json:
        return {
            "type": "function_call",
            "id": self.id or f"fc_{key}",
            "call_id": self._call.id,
            "name": self.name,
            **({"namespace": self.namespace} if self.namespace else {}),
            "arguments": self._call.arguments,
            "status": "completed",
        }

    @property
    def _call(self) -> ToolCall:
        return self.to_call(self.call_id or "")


class CallOutputItem(WireModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str | None = None
    output: str | ListOf[ContentPart] | None = None

    def turn(self, place: str, unsupported: Unsupported) -> Turn:
        text = content_text(self.output or "", f"{place}.output", unsupported)
        return Turn("tool", text, tool_call_id=self.call_id)

    def stored_form(self, key: str) -> Json:
        output = self.output or ""
        return {
            "type": "function_call_output",
            "id": self.id or f"fco_{key}",
            "call_id": self.call_id,
            "output": output if isinstance(output, str) else _kept_content(output, "input_text"),
            "status": "completed",
        }


class ThoughtPart(WireModel):
    """A part of reasoning."""

    text: str = ""


class ReasoningItem(WireModel):
    """Reasoning before a text or a call."""

    type: Literal["reasoning"]
    id: str | None = None
    content: ListOf[ThoughtPart] | None = None
    summary: ListOf[ThoughtPart] | None = None
    encrypted_content: str | None = None
    prefix: bool | None = None

    def turn(self, _place: str, _: Unsupported) -> Turn:
        return Turn("assistant", reasoning=self._reasoning)

    @property
    def is_unread(self) -> bool:
        """True if the item has only reasoning that another server encrypted."""
        return (
            not self._reasoning and read_reasoning(self.encrypted_content or REASONING_MARK) is None
        )

    @property
    def _reasoning(self) -> str:
        """The item's text, or else the unpacked ``encrypted_content``, or else the summary."""
        text = "".join(part.text for part in self.content or ())
        text = text or read_reasoning(self.encrypted_content or "") or ""
        return text or "\n\n".join(part.text for part in self.summary or ())

    def stored_form(self, key: str) -> Json:
        return {
            "type": "reasoning",
            "id": self.id or f"rs_{key}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": self._reasoning}],
            "status": "completed",
            **_kept_prefix(self.prefix),
        }


class LoadedToolsItem(WireModel):
    """Tools offered from this item on: the result of a tool search, or additions by the client."""

    type: Literal["tool_search_output", "additional_tools"]
    id: str | None = None
    call_id: str | None = None
    tools: ListOf[FlatTool] | None = None

    def turn(self, _place: str, _: Unsupported) -> Turn:
        text = "".join(description(tool) for tool, _ in functions(self.tools, "tools"))
        if self.type == "additional_tools":
            return Turn("system", text)
        return Turn("tool", text, tool_call_id=self.call_id or self.id)

    def stored_form(self, key: str) -> Json:
        return self.model_dump(exclude_none=True) | {"id": self.id or f"tso_{key}"}


class ReferenceItem(WireModel):
    """A reference to a stored item."""

    type: Literal["item_reference"] | None = None
    id: str


class OtherItem(WireModel):
    """An item of a type that no model here makes or reads."""

    type: str


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem | LoadedToolsItem
# Types of items that have a class here. unsupported.py handles other types.
TAGS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "CallOutput",
    "tool_search_output": "LoadedTools",
    "additional_tools": "LoadedTools",
    "reasoning": "Reasoning",
    "item_reference": "Reference",
}


def _readable(part: Any) -> Any:
    """Return a part with plain text as input_text. Some agents call such text encrypted_content."""
    text = part.get("encrypted_content") if isinstance(part, dict) else part
    is_text = isinstance(text, str) and not text.startswith(CIPHER_BEGIN)
    return {"type": "input_text", "text": text} if is_text else part


def _in_common_types(item: Any) -> Any:
    """Convert item types that only some clients use to the common types."""
    match item:
        case {"type": "custom_tool_call" | "local_shell_call" | "tool_search_call" as kind}:
            name, given = item.get("name"), item.get("arguments") or item.get("action")
            if not isinstance(given, str | dict):
                given = {"input": item.get("input")}
            name = name or kind.removesuffix("_call")
            return item | {"type": "function_call", "name": name, "arguments": given}
        case {"type": "custom_tool_call_output" | "local_shell_call_output"}:
            call_id = item.get("call_id") or item.get("id")
            return item | {"type": "function_call_output", "call_id": call_id}
        case {"type": "agent_message", "content": list() | str() as content}:
            author = f"Message from {item.get('author')}:\n"
            parts = [author, content] if isinstance(content, str) else [author, *content]
            return {"type": "message", "role": "user", "content": list(map(_readable, parts))}
    return item


def _tag(item: Any) -> str:
    """Return the tag of an item's class. Tags begin with capitals, so that errors omit the tags."""
    if not isinstance(item, dict):
        return "Message"
    if item.get("type") is None:
        return "Reference" if "id" in item and "role" not in item else "Message"
    return TAGS.get(str(item["type"]), "Other")


WireItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[LoadedToolsItem, Tag("LoadedTools")]
    | Annotated[ReferenceItem, Tag("Reference")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_tag),
    BeforeValidator(_in_common_types),
]
Placed = tuple[str, Item]
"""The item's name for error messages, and the item."""
Input = Annotated[
    Annotated[str, Tag("Text")] | Annotated[ListOf[WireItem], Tag("Items")],
    Discriminator(lambda value: "Text" if isinstance(value, str) else "Items"),
]


def read_input(
    value: str | list[WireItem], stored: Callable[[str], Item | None], unsupported: Unsupported
) -> list[Placed]:
    """Return the items that can be read. ``stored`` finds an item by id. Raises ApiError."""
    if isinstance(value, str):
        return [("input", MessageItem(role="user", content=value))]
    items: list[Placed] = []
    for number, item in enumerate(value):
        place = f"input[{number}]"
        read = stored(item.id) if isinstance(item, ReferenceItem) else item
        if read is None:
            raise invalid(
                "This refers to an item that is not stored, or not any more: send the item itself.",
                place,
                "item_not_found",
            )
        if isinstance(read, OtherItem) or (isinstance(read, ReasoningItem) and read.is_unread):
            unsupported.leave_out(read.type, place)
        else:
            items.append((place, read))
    return items


def _kept_prefix(prefix: bool | None) -> Json:
    return {"prefix": True} if prefix else {}


def _kept_content(content: str | list[ContentPart], kind: str) -> list[Json]:
    if isinstance(content, str):
        return [_kept_text(kind, content)]
    return [_kept_part(kind, part) for part in content if part.is_text or part.type in SHOWN]


def _kept_part(kind: str, part: ContentPart) -> Json:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    if part.is_text:
        return _kept_text(kind, part.text or "")
    # Keep only the fact that there was an image or a file, not its data.
    if part.type in IMAGES:
        return {"type": "input_image", "detail": "auto", "image_url": None, "file_id": None}
    return {"type": "input_file", "file_id": None}


def _kept_text(kind: str, text: str) -> Json:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


NOTHING_SAID = Turn("system")


def turns(items: Iterable[Placed], unsupported: Unsupported) -> tuple[Turn, ...]:
    """Return the items as turns. Neighbouring items of one message become one turn."""
    merged: list[Turn] = []
    last: Item | None = None
    for place, item in items:
        if (turn := item.turn(place, unsupported)) == NOTHING_SAID:
            continue
        if last is not None and _goes_on(merged[-1].role, last, turn.role, item):
            merged[-1] = _together(merged[-1], turn, is_begun(last))
        else:
            merged.append(turn)
        last = item
    return tuple(merged)


def check_begun(items: Sequence[Placed]) -> None:
    """Raise ApiError if the item after an item with ``prefix`` is not from the model."""
    for (place, item), (_, after) in pairwise(items):
        by_the_model = isinstance(after, CallItem | ReasoningItem) or (
            isinstance(after, MessageItem) and after.role == "assistant"
        )
        if is_begun(item) and not by_the_model:
            raise invalid(NOT_CONTINUED, f"{place}.prefix")


def is_begun(item: Item) -> bool:
    return isinstance(item, MessageItem | ReasoningItem) and bool(item.prefix)


def _goes_on(last_role: Role, last: Item, role: Role, item: Item) -> bool:
    """Return True if ``item`` belongs to the turn of ``last``. Within a turn, the model reasons
    before text and calls, and writes only one text."""
    if (last_role, role) != ("assistant", "assistant"):
        return False
    if is_begun(last):
        return True
    if isinstance(item, ReasoningItem):
        return isinstance(last, ReasoningItem)
    return not (isinstance(item, MessageItem) and isinstance(last, MessageItem))


def _together(one: Turn, more: Turn, is_one: bool) -> Turn:
    """Merge two turns. If ``is_one``, no line break is put between their reasoning texts."""
    between = "\n" if one.reasoning and more.reasoning and not is_one else ""
    return replace(
        one,
        text=one.text + more.text,
        reasoning=one.reasoning + between + more.reasoning,
        tool_calls=one.tool_calls + more.tool_calls,
    )
