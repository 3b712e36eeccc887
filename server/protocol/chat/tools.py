"""Convert tools and tool choices of requests to the types of server/text/conversation.py."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BeforeValidator, Field

from server.protocol.common import ListOf, WireModel
from server.protocol.wire_errors import check_count, invalid, quoted
from server.text.calls.tool_format import TOOL_NAME
from server.text.conversation import Tool, ToolChoice

PlacedTool = tuple[Tool, str]
"""A tool, and the name of the tool's field for error messages."""
MAX_TOOLS = 256


class FunctionTool(WireModel):
    """A function's name, description and parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class WireTool(WireModel):
    """A tool that the client offers. As in vLLM and Ollama, the type may be missing."""

    type: str = "function"
    function: FunctionTool | None = None


class NamedTool(WireModel):
    """A tool that a tool choice names."""

    type: str | None = None
    name: str | None = None
    function: "NamedTool | None" = None
    namespace: str | None = None

    def meant(self, tools: Sequence[Tool], place: str) -> frozenset[str]:
        """Return the names of the chosen tools: a function, or all functions of a namespace. Raises
        ApiError, in which ``place`` names the choice."""
        name = self.name if self.function is None else self.function.name
        if self.type not in ("function", "namespace", None) or name is None:
            raise invalid("Only functions can be chosen, by their name.", place)
        if self.type == "namespace":
            names = {tool.name for tool in tools if tool.namespace == name}
        else:
            names = {tool.name for tool in tools if tool.client_name == (self.namespace, name)}
        if not names:
            raise invalid("tool_choice names a tool that is not among the tools.", "tool_choice")
        return frozenset(names)


class AllowedTools(WireModel):
    """A tool choice's list of the tools that the model may call."""

    mode: str | None = None
    tools: ListOf[NamedTool] = Field(default_factory=list)


class WireToolChoice(NamedTool):
    """A tool choice that is an object rather than a word such as "auto"."""

    allowed_tools: AllowedTools | None = None

    @property
    def allowed(self) -> tuple[AllowedTools, str]:
        """The tools that the model may call, and the name of their field in errors."""
        return self.allowed_tools or AllowedTools(), "tool_choice.allowed_tools"


def _as_word(choice: Any) -> Any:
    """Replace an object such as {"type": "auto"}, which Cursor sends, by the word of its type."""
    match choice:
        case {"type": "auto" | "none" | "required" as word}:
            return word
    return choice


AsWord = BeforeValidator(_as_word)


def read_tools(tools: list[WireTool]) -> tuple[Tool, ...]:
    placed = []
    for number, tool in enumerate(tools):
        if tool.type != "function":
            kind = quoted(tool.type)
            raise invalid(
                f"A tool of type {kind} is not supported: describe it as a function.",
                f"tools[{number}]",
            )
        if tool.function is None:
            raise invalid("This tool has no function.", f"tools[{number}].function")
        placed.append((tool.function.tool, f"tools[{number}].function.name"))
    return collect_tools(placed)


def with_loaded(
    tools: Iterable[PlacedTool], loaded: Iterable[PlacedTool], *, searched: bool
) -> list[PlacedTool]:
    """Add the ``loaded`` tools, which messages define, except those whose names are in ``tools``.
    If ``searched``, the client wants a tool search. quire has none: prompts show all ``tools``."""
    first = [(replace(it, deferred=it.deferred and not searched), place) for it, place in tools]
    names = {tool.name for tool, _ in first}
    late = {tool.name: (replace(tool, deferred=True), place) for tool, place in loaded}
    return first + [placed for name, placed in late.items() if name not in names]


def collect_tools(tools: Sequence[PlacedTool]) -> tuple[Tool, ...]:
    """Return the tools in their order. Raises ApiError for too many tools, for a repeated name,
    and for a name that some model's call format cannot express."""
    check_count(len(tools), MAX_TOOLS, "tools")
    by_name: dict[str, Tool] = {}
    for tool, place in tools:
        if not all(TOOL_NAME.fullmatch(name) for name in tool.client_name if name is not None):
            raise invalid(
                "A tool's name must have 1 to 128 letters of ASCII, digits or characters of _.:/-",
                place,
            )
        if tool.name in by_name:
            raise invalid("Two tools have this name.", place)
        by_name[tool.name] = tool
    return tuple(by_name.values())


def read_tool_choice(choice: str | WireToolChoice | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Return a choice as ToolChoice. Raises ApiError if the choice needs a tool that is missing."""
    if choice is None or choice in ("none", "auto"):
        return ToolChoice("none" if choice == "none" or not tools else "auto")
    if isinstance(choice, str) and choice != "required":
        raise invalid(f"There is no tool_choice {quoted(choice)}.", "tool_choice")
    if not tools:
        raise invalid("tool_choice asks for a call, but there are no tools.", "tool_choice")
    if isinstance(choice, str):
        return ToolChoice("required")
    if choice.type == "allowed_tools":
        return _allowed(*choice.allowed, tools)
    names = choice.meant(tools, "tool_choice")
    if choice.type == "namespace":
        return ToolChoice("required", allowed=names)
    (name,) = names
    return ToolChoice("named", name)


def _allowed(allowed: AllowedTools, place: str, tools: tuple[Tool, ...]) -> ToolChoice:
    names = frozenset[str]().union(
        *(tool.meant(tools, f"{place}.tools[{n}]") for n, tool in enumerate(allowed.tools))
    )
    if not names:
        raise invalid("At least one tool must be allowed.", f"{place}.tools")
    if allowed.mode == "required":
        return ToolChoice("required", allowed=names)
    if allowed.mode not in ("auto", None):
        raise invalid("The mode must be auto or required.", f"{place}.mode")
    return ToolChoice("auto", allowed=names)
