"""The tools of /v1/responses, which are flat: wire -> neutral form, and back."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from server.protocol.answers import Json
from server.protocol.chat.tools import (
    AllowedTools,
    FunctionTool,
    NamedTool,
    WireToolChoice,
    collected,
)
from server.protocol.common import ListOf, WireModel
from server.text.conversation import Tool, ToolChoice


class FlatFunction(FunctionTool):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(WireModel):
    """Something that is to happen at the server, or a form that no model here was taught."""

    type: str


def _tag(tool: Any) -> str:
    """Return the tag of a tool. Tags begin with capitals, so that errors leave them out."""
    return "Function" if isinstance(tool, dict) and tool.get("type") == "function" else "Other"


FlatTool = Annotated[
    Annotated[FlatFunction, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(_tag),
]


class FlatToolChoice(WireToolChoice):
    """A choice that is more than a word, with its parts at the top."""

    mode: str | None = None
    tools: ListOf[NamedTool] | None = None

    @property
    def allowed(self) -> tuple[AllowedTools, str]:
        """See WireToolChoice."""
        return AllowedTools(mode=self.mode, tools=self.tools or []), "tool_choice"


def read_flat_tools(tools: list[FlatTool], max_tools: int) -> tuple[Tool, ...]:
    """Return the functions, in their order; other tools are left out.

    Raises ApiError that names the one at fault.
    """
    return collected(tools, max_tools, _read)


def _read(tool: FlatTool, place: str) -> tuple[Tool, str] | None:
    return (tool.tool, f"{place}.name") if isinstance(tool, FlatFunction) else None


def tool_object(tool: Tool) -> Json:
    """Return a function as responses repeat it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def tool_choice_object(choice: ToolChoice) -> Json:
    """Return a choice that is an object, as responses repeat it."""
    if choice.allowed is not None:
        tools = [{"type": "function", "name": name} for name in sorted(choice.allowed)]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return {"type": "function", "name": choice.name}
