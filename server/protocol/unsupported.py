"""Replace or refuse content that is not text, because the models here read only text."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from server.config import UnseenRule
from server.protocol.wire_errors import ApiError, invalid, quoted
from server.text.conversation import Tool

Api = Literal["chat", "responses", "messages", "ollama"]
IMAGES = frozenset({"image", "image_url", "input_image"})
FILES = frozenset({"document", "file", "input_file"})
AUDIO = frozenset({"audio", "input_audio"})
# Agents use these APIs and send old parts again and again, so unsupported parts are omitted.
AGENTS: frozenset[Api] = frozenset({"messages", "responses"})
# The log names unknown types of message parts only if they match KIND, and at most MAX_KINDS types.
MAX_KINDS, KIND, UNKNOWN = 16, re.compile(r"[a-z0-9_]{1,64}"), "unknown"


class Unsupported:
    """Replaces or refuses images, files and other content that is not text, and counts them."""

    def __init__(self, rule: UnseenRule, setting: str, api: Api = "chat") -> None:
        """``rule`` refuses or replaces images and files. ``setting`` names the rule's setting."""
        self.count = 0
        """The number of images and files that a note has replaced."""
        self.left_out = Counter[str]()
        """The number of parts of messages that were omitted without a note, by type."""
        self._rule = rule
        self._setting = setting
        self._leaves_out = api in AGENTS
        self._tools: dict[str, Tool] = {}

    def note(self, kind: str, place: str) -> str:
        """Return the note that replaces a part of type ``kind``. Raises ApiError (400)."""
        if kind not in IMAGES | FILES:
            return self.leave_out(kind, place)
        if self._rule == "refuse":
            raise unsupported_error(
                kind, place, f' With {self._setting} = "placeholder" the server leaves it out.'
            )
        self.count += 1
        return f"[{'image' if kind in IMAGES else 'file'} not shown: this server reads text only]"

    def leave_out(self, kind: str, place: str) -> str:
        """Count an omitted part of type ``kind`` and return "". Raises ApiError like ``note``."""
        if not self._leaves_out or kind in AUDIO:
            raise unsupported_error(kind, place)
        is_named = KIND.fullmatch(kind) and len(self.left_out) < MAX_KINDS
        self.left_out[kind if is_named else UNKNOWN] += 1
        return ""

    def offer(self, tools: Iterable[Tool]) -> None:
        """Set the tools that parts of the conversation may load by name."""
        self._tools = {tool.name: tool for tool in tools}

    def loaded(self, name: str) -> str:
        """Return a tool's description if the prompt omits the tool, or else the tool's name."""
        tool = self._tools.get(name)
        return description(tool) if tool is not None and tool.deferred else f"{name}\n"


def description(tool: Tool) -> str:
    """Return a line that describes a tool as chat templates do."""
    return json.dumps(tool.described, ensure_ascii=False) + "\n"


def unsupported_error(kind: str, place: str, remedy: str = "") -> ApiError:
    return invalid(
        f"Content of type {quoted(kind)} is not supported here: this model reads text.{remedy}",
        place,
    )
