"""The messages of a chat: wire -> turns."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import model_validator

from server.protocol.common import ListOf, WireModel
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import invalid, quoted
from server.text.conversation import ToolCall, Turn

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ContentPart(WireModel):
    """A part of a message's content; as in vLLM a string is one, and its text may be null."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, part: Any) -> Any:
        return {"type": "text", "text": part} if isinstance(part, str) else part

    @property
    def is_text(self) -> bool:
        """Whether it says something, and does not show it."""
        return self.type in (*TEXT_PARTS, "refusal")

    def text_for_model(self, place: str, unseen: Unseen) -> str:
        """Return what the model reads of it. Raises ApiError."""
        if not self.is_text:
            return unseen.note(self.type, place)
        return (self.refusal if self.type == "refusal" else self.text) or ""


def content_text(content: str | Sequence[ContentPart], place: str, unseen: Unseen) -> str:
    """Return content as one string. place: how errors name it. Raises ApiError for what is no
    text."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        texts.append(part.text_for_model(f"{place}[{number}]", unseen))
    return "".join(texts)


class CalledFunction(WireModel):
    """Which function was called, and with what."""

    name: str
    arguments: str | dict[str, Any] | None = None

    def made(self, call_id: str) -> ToolCall:
        """Return the call in the neutral form. Some clients send the arguments as an object."""
        arguments = self.arguments or ""
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(call_id, self.name, arguments)


class MadeCall(WireModel):
    """A call that an earlier answer made."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class AudioReference(WireModel):
    """Earlier audio, which no answer of this server has."""

    id: str | None = None


class Message(WireModel):
    """One message of a conversation. ``name`` and whatever else it has is ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[ContentPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: ListOf[MadeCall] | None = None
    function_call: CalledFunction | None = None
    audio: AudioReference | None = None
    prefix: bool | None = None
    """Whether the answer goes on with it."""

    def turn(self, place: str, unseen: Unseen) -> Turn:
        """Return the message in the neutral form. place: how errors name the message. Raises
        ApiError."""
        if self.audio is not None:
            raise invalid("Audio is not supported: this model reads text.", f"{place}.audio")
        return Turn(
            ROLES[self.role],
            self._text(place, unseen),
            self.reasoning_content or self.reasoning or "",
            self._calls(place),
            self.tool_call_id,
        )

    def _text(self, place: str, unseen: Unseen) -> str:
        if self.content is None:
            return self.refusal or ""
        return content_text(self.content, f"{place}.content", unseen)

    def _calls(self, place: str) -> tuple[ToolCall, ...]:
        calls = []
        for number, call in enumerate(self.tool_calls or ()):
            if call.function is None:
                raise invalid(
                    f"A call of type {quoted(call.type or '')} is not supported: only functions "
                    "can be called.",
                    f"{place}.tool_calls[{number}]",
                )
            calls.append(call.function.made(call.id or ""))
        if self.function_call is not None:
            calls.append(self.function_call.made(""))
        return tuple(calls)
