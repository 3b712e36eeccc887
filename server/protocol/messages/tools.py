"""The tools of /v1/messages, and which of them must or may be called: wire -> neutral form."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from server.protocol.chat.tools import PlacedTool, collected, with_loaded
from server.protocol.common import WireModel
from server.protocol.wire_errors import invalid, quoted
from server.text.conversation import Tool, ToolChoice

# Anthropic's servers run these themselves. The model is not told of them, so that a client that
# always offers some of them gets answers.
SEARCH_TOOLS = "tool_search_tool_"
SERVER_TOOLS = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    SEARCH_TOOLS,
    "mcp_toolset",
    "advisor_",
)


class OfferedTool(WireModel):
    """A tool of any type. Of Anthropic's own types nobody here knows what they take."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_run_by_anthropic(self) -> bool:
        return self.type is not None and self.type.startswith(SERVER_TOOLS)

    def tool(self, place: str) -> Tool:
        """Return the tool in the neutral form. Raises ApiError."""
        if self.type not in (None, "custom"):
            raise invalid(
                f"A tool of type {quoted(self.type or '')} is not supported: describe it with an "
                "input_schema.",
                place,
            )
        if self.name is None:
            raise invalid("This tool has no name.", f"{place}.name")
        strict, deferred = bool(self.strict), bool(self.defer_loading)
        return Tool(self.name, self.description, self.input_schema, strict, deferred)


class OfferedChoice(WireModel):
    """Whether the model may, must or must not call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def read(self, tools: tuple[Tool, ...]) -> ToolChoice:
        """Return the choice in the neutral form. Raises ApiError for a choice that cannot be
        made."""
        if self.type in ("auto", "none"):
            return ToolChoice("none" if self.type == "none" or not tools else "auto")
        if not tools:
            raise invalid("tool_choice asks for a call, but there are no tools.", "tool_choice")
        if self.type == "any":
            return ToolChoice("required")
        if self.name not in {tool.name for tool in tools}:
            raise invalid(
                "tool_choice names a tool that is not among the tools.", "tool_choice.name"
            )
        return ToolChoice("named", self.name)


def read_offered_tools(
    tools: Sequence[OfferedTool], added: Iterable[tuple[OfferedTool, str]]
) -> tuple[Tool, ...]:
    """Return the tools that a client runs, in their order. added: those that messages define, each
    with how errors name it. Raises ApiError that names the one at fault."""
    placed = ((tool, f"tools[{number}]") for number, tool in enumerate(tools))
    searched = any((tool.type or "").startswith(SEARCH_TOOLS) for tool in tools)
    return collected(with_loaded(_read(placed), _read(added), searched=searched))


def _read(tools: Iterable[tuple[OfferedTool, str]]) -> list[PlacedTool]:
    own = ((tool, place) for tool, place in tools if not tool.is_run_by_anthropic)
    return [(tool.tool(place), f"{place}.name") for tool, place in own]
