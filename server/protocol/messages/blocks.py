"""The messages and the system prompt of /v1/messages: wire -> turns."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import model_validator

from server.protocol.common import ListOf, WireModel
from server.protocol.messages.tools import OfferedTool
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import invalid
from server.text.conversation import ToolCall, Turn

# Claude Code's first line, which differs from one request to the next: with it nothing that
# follows could come from the cache.
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
FAILED = "Error: "
# The types of blocks that are read; server/protocol/unseen.py has what becomes of the others.
READ = frozenset(
    {
        *("text", "thinking", "redacted_thinking", "compaction", "image", "document"),
        *("tool_use", "tool_result", "search_result", "tool_reference", "tool_addition"),
    }
)


class TextBlock(WireModel):
    """A block where there is nothing but text. ``cache_control`` and whatever else is ignored."""

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, block: Any) -> Any:
        """Drop all but the type of a block that is not read: nothing is known of its fields."""
        kind = block.get("type") if isinstance(block, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in READ else block

    def text_for_model(self, place: str, unseen: Unseen) -> str:
        """Return the text that the model reads; see ``Unseen.note``."""
        if self.type == "text":
            return self.text or ""
        # What may stand elsewhere alone is left out here, too.
        return unseen.note(self.type, place)


class Source(WireModel):
    """What an image or a document is. Only text is looked at."""

    type: str | None = None
    data: str | None = None
    content: str | ListOf[TextBlock] | None = None

    def text_for_model(self, place: str, unseen: Unseen) -> str | None:
        """Return the text; None where it is none."""
        if self.type == "text":
            return self.data
        if self.type != "content" or self.content is None:
            return None
        return joined_text(self.content, f"{place}.content", unseen)


class ShownBlock(TextBlock):
    """A block of a tool's result."""

    source: Source | str | None = None
    title: str | None = None
    content: "str | ListOf[ShownBlock] | None" = None
    tool_name: str | None = None

    def text_for_model(self, place: str, unseen: Unseen) -> str:
        """See TextBlock. A document of text is its text."""
        if self.type == "document" and isinstance(self.source, Source):
            text = self.source.text_for_model(f"{place}.source", unseen)
            if text is not None:
                return text
        if self.type == "search_result":
            text = joined_text(self.content or "", f"{place}.content", unseen)
            return f"{self.title or ''}\n{self.source or ''}\n{text}\n"
        if self.type == "tool_reference" and self.tool_name is not None:
            return unseen.loaded(self.tool_name)
        return super().text_for_model(place, unseen)


class AddedTool(WireModel):
    """A tool that is offered from here on, by its name or as it is."""

    name: str | None = None
    definition: OfferedTool | None = None


class Block(ShownBlock):
    """A block of a user's or of an assistant's message."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | list[Any] | str | None = None
    """Agents keep what was no object, if a model has called so."""
    tool_use_id: str | None = None
    is_error: bool | None = None
    tool: AddedTool | None = None

    def text_for_model(self, place: str, unseen: Unseen) -> str:
        """See TextBlock. A compaction is the summary of what it stands for."""
        if self.type == "compaction":
            return joined_text(self.content or "", f"{place}.content", unseen)
        if self.type == "tool_addition":
            tool = self.tool or AddedTool()
            name = tool.name if tool.definition is None else tool.definition.name
            return unseen.leave_out(self.type, place) if name is None else unseen.loaded(name)
        return super().text_for_model(place, unseen)

    def call(self, place: str) -> ToolCall:
        """Return a tool_use in the neutral form, with the arguments written as the models write
        them."""
        if self.name is None:
            raise invalid("The tool has no name.", f"{place}.name")
        given = self.input or {}
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return ToolCall(self.id or "", self.name, arguments)

    def result(self, place: str, unseen: Unseen) -> Turn:
        """Return the text of a tool_result. One that is an error says so."""
        text = joined_text(self.content or "", f"{place}.content", unseen)
        if self.is_error and not text.lower().startswith("error"):
            text = FAILED + text
        return Turn("tool", text, tool_call_id=self.tool_use_id)


class InputMessage(WireModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]

    def added_tools(self, place: str) -> Iterator[tuple[OfferedTool, str]]:
        """Yield the tools that are defined here, each with how errors name it."""
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if block.tool is not None and block.tool.definition is not None:
                yield block.tool.definition, f"{place}.content[{number}].tool.definition"

    def turns(self, place: str, unseen: Unseen) -> list[Turn]:
        """Return the message in the neutral form: an assistant's message is one turn; a user's is
        one for every result of a tool and every run of text. place: how errors name it. Raises
        ApiError."""
        if self.role == "system":
            text = "\n\n".join(system_texts(self.content, f"{place}.content", unseen))
            return [Turn("system", text)] if text else []
        if isinstance(self.content, str):
            return [Turn(self.role, self.content)]
        blocks = [(f"{place}.content[{n}]", block) for n, block in enumerate(self.content)]
        return _heard(blocks, unseen) if self.role == "user" else [_spoken(blocks, unseen)]


def system_texts(content: str | Sequence[TextBlock], place: str, unseen: Unseen) -> list[str]:
    """Return the parts of a system prompt, without what is billed to whom. Raises ApiError."""
    blocks = [content] if isinstance(content, str) else _texts(content, place, unseen)
    texts = [_without_billing(text) for text in blocks]
    return [text for text in texts if text]


def joined_text(content: str | Sequence[TextBlock], place: str, unseen: Unseen) -> str:
    """Join content to one string. Raises ApiError."""
    return content if isinstance(content, str) else "".join(_texts(content, place, unseen))


def _texts(blocks: Sequence[TextBlock], place: str, unseen: Unseen) -> list[str]:
    return [
        block.text_for_model(f"{place}[{number}]", unseen) for number, block in enumerate(blocks)
    ]


def _without_billing(text: str) -> str:
    found = BILLING.match(text)
    return text if found is None else text[found.end() :]


def _heard(blocks: list[tuple[str, Block]], unseen: Unseen) -> list[Turn]:
    """Return the turns of a user's message: results of tools, and text."""
    turns: list[Turn] = []
    texts: list[str] = []
    for place, block in blocks:
        if block.type != "tool_result":
            texts.append(block.text_for_model(place, unseen))
            continue
        if texts:
            turns.append(Turn("user", "".join(texts)))
            texts = []
        turns.append(block.result(place, unseen))
    return [*turns, Turn("user", "".join(texts))] if texts or not turns else turns


def _spoken(blocks: list[tuple[str, Block]], unseen: Unseen) -> Turn:
    """Return the turn of an assistant's message: reasoning, text and calls."""
    reasoning, texts, calls = [], [], []
    for place, block in blocks:
        if block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(block.call(place))
        # What is redacted is a cipher of Anthropic's, which nobody else can read.
        elif block.type != "redacted_thinking":
            texts.append(block.text_for_model(place, unseen))
    return Turn("assistant", "".join(texts), "\n\n".join(reasoning), tuple(calls))
