"""The tools of /v1/responses, which are flat: wire -> neutral form, and back."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from server.conversation import Tool, ToolChoice
from server.protocol.chat.tools import (
    AllowedTools,
    FunctionTool,
    NamedTool,
    WireToolChoice,
    check_tool_name,
)
from server.protocol.common import WireModel
from server.protocol.errors import invalid

Json = dict[str, Any]


class FlatFunction(FunctionTool):
    """A function that the model may call."""

    type: Literal["function"]


class OtherTool(WireModel):
    """Something that is to happen at the server, or a form that no model here was taught."""

    type: str


def _tag(tool: Any) -> str:
    """Tags begin with capitals, so that errors leave them out."""
    return "Function" if isinstance(tool, dict) and tool.get("type") == "function" else "Other"


FlatTool = Annotated[
    Annotated[FlatFunction, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(_tag),
]


class FlatToolChoice(WireToolChoice):
    """A choice that is more than a word, with its parts at the top."""

    mode: str | None = None
    tools: list[NamedTool] | None = None

    @property
    def allowed(self) -> tuple[AllowedTools, str]:
        """See WireToolChoice."""
        return AllowedTools(mode=self.mode, tools=self.tools or []), "tool_choice"


def read_flat_tools(tools: list[FlatTool], max_tools: int) -> tuple[Tool, ...]:
    """The functions, in their order; other tools are left out, as if they were never needed.

    Raises ApiError that names the one at fault.
    """
    if len(tools) > max_tools:
        raise invalid(f"There are {len(tools)} tools; at most {max_tools} are read.", "tools")
    found: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        if not isinstance(tool, FlatFunction):
            continue
        place = f"tools[{number}].name"
        check_tool_name(tool.name, place)
        if tool.name in found:
            raise invalid("Two tools have this name.", place)
        found[tool.name] = Tool(tool.name, tool.description, tool.parameters, bool(tool.strict))
    return tuple(found.values())


def tool_object(tool: Tool) -> Json:
    """A function as responses repeat it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def tool_choice_object(choice: ToolChoice) -> Json:
    """A choice that is more than a word, as responses repeat it."""
    if choice.allowed is not None:
        tools = [{"type": "function", "name": name} for name in sorted(choice.allowed)]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return {"type": "function", "name": choice.name}
