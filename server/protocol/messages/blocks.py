"""The messages and the system prompt of /v1/messages: wire -> turns."""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from server.conversation import ToolCall, Turn
from server.protocol.common import ListOf, WireModel
from server.protocol.errors import ApiError, invalid, quoted

# Claude Code's first line, which differs from one request to the next: with it nothing that
# follows could come from the cache.
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
FAILED = "Error: "


class TextBlock(WireModel):
    """A block where there is nothing but text. ``cache_control`` and whatever else is ignored."""

    type: str
    text: str | None = None

    def said(self, place: str) -> str:
        """The text. Raises ApiError for anything else."""
        if self.type != "text" or self.text is None:
            raise unsupported(self.type, place)
        return self.text


class Block(TextBlock):
    """A block of a user's or of an assistant's message."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | ListOf[TextBlock] | None = None
    is_error: bool | None = None

    def call(self, place: str) -> ToolCall:
        """A tool_use. The arguments are written as the models write them."""
        if self.name is None:
            raise invalid("The tool has no name.", f"{place}.name")
        arguments = json.dumps(self.input or {}, ensure_ascii=False)
        return ToolCall(self.id or "", self.name, arguments)

    def result(self, place: str) -> Turn:
        """A tool_result. One that is an error says so."""
        text = joined_text(self.content or "", f"{place}.content")
        if self.is_error and not text.lower().startswith("error"):
            text = FAILED + text
        return Turn("tool", text, tool_call_id=self.tool_use_id)


class InputMessage(WireModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]

    def turns(self, place: str) -> list[Turn]:
        """The neutral form: an assistant's message is one turn; a user's is one for every result of
        a tool and every run of text. place: how errors name it. Raises ApiError."""
        if self.role == "system":
            text = "\n\n".join(system_texts(self.content, f"{place}.content"))
            return [Turn("system", text)] if text else []
        if isinstance(self.content, str):
            return [Turn(self.role, self.content)]
        blocks = [(f"{place}.content[{n}]", block) for n, block in enumerate(self.content)]
        return _heard(blocks) if self.role == "user" else [_spoken(blocks)]


def system_texts(content: str | Sequence[TextBlock], place: str) -> list[str]:
    """The parts of a system prompt, without what is billed to whom. Raises ApiError."""
    blocks = [content] if isinstance(content, str) else _texts(content, place)
    texts = [_without_billing(text) for text in blocks]
    return [text for text in texts if text]


def joined_text(content: str | Sequence[TextBlock], place: str) -> str:
    """Content that can only be text, as one string. Raises ApiError."""
    return content if isinstance(content, str) else "".join(_texts(content, place))


def unsupported(kind: str, place: str) -> ApiError:
    """400 for a block that no prompt can have."""
    return invalid(
        f"Content of type {quoted(kind)} is not supported here: this model reads text.", place
    )


def _texts(blocks: Sequence[TextBlock], place: str) -> list[str]:
    return [block.said(f"{place}[{number}]") for number, block in enumerate(blocks)]


def _without_billing(text: str) -> str:
    found = BILLING.match(text)
    return text if found is None else text[found.end() :]


def _heard(blocks: list[tuple[str, Block]]) -> list[Turn]:
    """What an assistant hears: its tools, and the user."""
    turns: list[Turn] = []
    texts: list[str] = []
    for place, block in blocks:
        if block.type != "tool_result":
            texts.append(block.said(place))
            continue
        if texts:
            turns.append(Turn("user", "".join(texts)))
            texts = []
        turns.append(block.result(place))
    return [*turns, Turn("user", "".join(texts))] if texts or not turns else turns


def _spoken(blocks: list[tuple[str, Block]]) -> Turn:
    """All that an assistant did in one message."""
    thoughts, texts, calls = [], [], []
    for place, block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(block.call(place))
        # What is redacted is a cipher of Anthropic's, which nobody else can read.
        elif block.type != "redacted_thinking":
            texts.append(block.said(place))
    return Turn("assistant", "".join(texts), "\n\n".join(thoughts), tuple(calls))
