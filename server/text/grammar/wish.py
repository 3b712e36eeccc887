"""What an answer must be like, from all parts of a request that say so."""

from dataclasses import dataclass

from server.conversation import OutputFormat, Tool
from server.text.calls.tool_format import ToolFormat
from server.text.grammar.thoughts import ThinkingStart


@dataclass(frozen=True, slots=True)
class Wish:
    """What an answer must be like."""

    output: OutputFormat | None = None
    """Of an answer that is no call."""
    tools: tuple[Tool, ...] = ()
    """Those that may be called."""
    tool_format: ToolFormat = ToolFormat.HERMES
    must_call: bool = False
    """Nothing but calls is an answer."""
    parallel: bool = True
    """Whether there may be several calls."""
    thinking: ThinkingStart = ThinkingStart.SAYING
    thinking_budget: int | None = None
    """Tokens."""
