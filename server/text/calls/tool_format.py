"""Find out from its chat template how a model writes its calls."""

from enum import Enum

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN = "<function="


class ToolFormat(Enum):
    """Both stand between the tags; any number of calls may follow each other."""

    HERMES = "hermes"
    """``{"name": "f", "arguments": {"x": 1}}``."""
    XML = "xml"
    """``<function=f><parameter=x>1</parameter></function>``, each value on lines of its own."""


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template shows its model; None where it shows neither."""
    if CALL_OPEN not in template:
        return None
    return ToolFormat.XML if FUNCTION_OPEN in template else ToolFormat.HERMES
