"""The formats in which models write calls."""

import re
from enum import Enum

from server.text.conversation import Tool

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN = "<function="
PYTHON_TAG = "<|python_tag|>"
TOOL_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
# Templates show Llama 3 calls like this; descriptions of tools look similar.
LLAMA_CALL = re.compile(r'\{\\?"name\\?":(?:(?!description)[^{}])*\\?"parameters\\?":')


class ToolFormat(Enum):
    """HERMES and XML stand between tags, and any number of calls may follow each other."""

    HERMES = "hermes"
    """``{"name": "f", "arguments": {"x": 1}}``."""
    XML = "xml"
    """``<function=f><parameter=x>1</parameter></function>``, each value on lines of its own."""
    LLAMA = "llama"
    """``{"name": "f", "parameters": {"x": 1}}``: the whole answer."""


# Some models leave <tool_call> out at the beginning of a line.
OPENERS = (CALL_OPEN, FUNCTION_OPEN, PYTHON_TAG)
OPENING = {
    ToolFormat.HERMES: re.compile(f"({CALL_OPEN})"),
    ToolFormat.XML: re.compile(f"({CALL_OPEN}|^{FUNCTION_OPEN})", re.MULTILINE),
    ToolFormat.LLAMA: re.compile(rf"\A\s*({re.escape(PYTHON_TAG)}|(?=\{{))"),
}


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template shows to its model; None where it shows none."""
    if CALL_OPEN not in template:
        return ToolFormat.LLAMA if LLAMA_CALL.search(template) else None
    return ToolFormat.XML if FUNCTION_OPEN in template else ToolFormat.HERMES


def is_called(name: str, tools: tuple[Tool, ...]) -> bool:
    """Return whether a call of this name is one. Clients that load tools tell the model the names
    first and answer calls that come too early, so every valid name counts there."""
    loads = any(tool.deferred for tool in tools) and TOOL_NAME.fullmatch(name) is not None
    return loads or any(tool.name == name for tool in tools)
