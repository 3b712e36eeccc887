"""The formats in which models write tool calls."""

import re
import secrets
from enum import Enum

from server.text.conversation import Tool

CALL_ID_BYTES = 12
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN = "<function="
PYTHON_TAG = "<|python_tag|>"
HARMONY_HEADER = "<|start|>assistant<|channel|>"
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
# Templates show Llama 3 calls in this form. Tools have a similar form, but also a description.
LLAMA_CALL = re.compile(r'\{\\?"name\\?":(?:(?!description)[^{}])*\\?"parameters\\?":')


class ToolFormat(Enum):
    """A model's format of tool calls. In HERMES and XML, a call is between <tool_call> tags."""

    HERMES = "hermes"
    """``{"name": "f", "arguments": {"x": 1}}``"""
    XML = "xml"
    """``<function=f><parameter=x>1</parameter></function>``, with values on lines of their own."""
    LLAMA = "llama"
    """``{"name": "f", "parameters": {"x": 1}}`` as the whole answer."""
    HARMONY = "harmony"
    """A call is one of the messages of which the whole answer consists (``harmony.py``)."""


# Models open calls with these tags. Some omit <tool_call> if the call begins a line.
OPENERS = (CALL_OPEN, FUNCTION_OPEN, PYTHON_TAG)
OPENING = {
    ToolFormat.HERMES: re.compile(f"({CALL_OPEN})"),
    ToolFormat.XML: re.compile(f"({CALL_OPEN}|^{FUNCTION_OPEN})", re.MULTILINE),
    ToolFormat.LLAMA: re.compile(rf"\A\s*({re.escape(PYTHON_TAG)}|(?=\{{))"),
    ToolFormat.HARMONY: re.compile(r"(?!)"),  # no text of a message opens a call
}


def tool_format(template: str) -> ToolFormat | None:
    """Return the call format that a chat template shows to its model, or None without one."""
    if HARMONY_HEADER in template:
        return ToolFormat.HARMONY
    if CALL_OPEN not in template:
        return ToolFormat.LLAMA if LLAMA_CALL.search(template) else None
    return ToolFormat.XML if FUNCTION_OPEN in template else ToolFormat.HERMES


def is_called(name: str, tools: tuple[Tool, ...]) -> bool:
    """Return True if a call with this name is valid. If any tool is deferred (loaded later), every
    well-formed name is valid, because clients answer calls to tools that are not loaded."""
    loads = any(tool.deferred for tool in tools) and TOOL_NAME.fullmatch(name) is not None
    return loads or any(tool.name == name for tool in tools)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(CALL_ID_BYTES)}"
