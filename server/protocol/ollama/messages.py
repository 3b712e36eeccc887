"""The messages of /api/chat: wire -> turns."""

from typing import Literal

from server.protocol.chat.messages import CalledFunction
from server.protocol.common import ListOf, WireModel
from server.protocol.unseen import Unseen
from server.text.conversation import ToolCall, Turn


class ChatCall(WireModel):
    """A call that an earlier answer made."""

    id: str | None = None
    function: CalledFunction


class ChatMessage(WireModel):
    """One message of a conversation. ``tool_name`` and whatever else it has is ignored."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: ListOf[str] | None = None
    tool_calls: ListOf[ChatCall] | None = None
    tool_call_id: str | None = None

    def turn(self, place: str, unseen: Unseen) -> Turn:
        """Return the message in the neutral form. place: how errors name the message. Raises
        ApiError."""
        return Turn(
            self.role,
            with_images(self.content or "", self.images, place, unseen),
            self.thinking or "",
            self._calls,
            self.tool_call_id,
        )

    @property
    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(call.function.made(call.id or "") for call in self.tool_calls or ())


def with_images(text: str, images: list[str] | None, place: str, unseen: Unseen) -> str:
    """Return what the model reads of a text and the images before it. place: how errors name what
    has both. Raises ApiError."""
    notes = [unseen.note("image", f"{place}images[{n}]") for n in range(len(images or ()))]
    return "\n".join([*notes, text])
