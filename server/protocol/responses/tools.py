"""Convert tools of /v1/responses to the types of server/text/conversation.py, and back."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from server.protocol.answers import Json
from server.protocol.chat.tools import (
    AllowedTools,
    FunctionTool,
    NamedTool,
    PlacedTool,
    WireToolChoice,
    collect_tools,
    with_loaded,
)
from server.protocol.common import ListOf, WireModel
from server.text.conversation import Tool, ToolChoice

SEARCH = "tool_search"
SEPARATORS, MARK = re.compile(r"[.:]"), r":\g<0>"


class FlatFunction(FunctionTool):
    """A function that the model may call."""

    type: Literal["function"]
    defer_loading: bool | None = None

    @property
    def tool(self) -> Tool:
        return replace(super().tool, deferred=bool(self.defer_loading))


class SearchTool(WireModel):
    """A tool search that the client performs. The model calls the search like a function."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def tool(self) -> Tool:
        return Tool(SEARCH, self.description, self.parameters, searches=True)


class OtherTool(WireModel):
    """A tool of a type that this server neither runs nor offers to the model."""

    type: str


TAGS = {"function": "Function", "namespace": "Namespace"}


def _tag(tool: Any) -> str:
    """Return the tag of a tool's class. Tags begin with capitals, so that errors omit the tags."""
    given = tool if isinstance(tool, dict) else tool.__dict__ if isinstance(tool, WireModel) else {}
    if (given.get("type"), given.get("execution")) == (SEARCH, "client"):
        return "Search"
    return TAGS.get(str(given.get("type")), "Other")


GroupedTool = Annotated[
    Annotated[FlatFunction, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(lambda tool: "Function" if _tag(tool) == "Function" else "Other"),
]


class Namespace(WireModel):
    """A client's group of functions, such as those of one MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: ListOf[GroupedTool] | None = None


FlatTool = Annotated[
    Annotated[FlatFunction, Tag("Function")]
    | Annotated[Namespace, Tag("Namespace")]
    | Annotated[SearchTool, Tag("Search")]
    | Annotated[OtherTool, Tag("Other")],
    Discriminator(_tag),
]


class FlatToolChoice(WireToolChoice):
    """A tool choice that is an object with ``mode`` and ``tools`` as its own fields."""

    mode: str | None = None
    tools: ListOf[NamedTool] | None = None

    @property
    def allowed(self) -> tuple[AllowedTools, str]:
        return AllowedTools(mode=self.mode, tools=self.tools or []), "tool_choice"


def read_flat_tools(tools: Sequence[FlatTool], loaded: Iterable[PlacedTool]) -> tuple[Tool, ...]:
    """Return the functions in ``tools`` and the tools that input items have ``loaded``."""
    searched = any(isinstance(tool, OtherTool) and tool.type == SEARCH for tool in tools)
    return collect_tools(with_loaded(functions(tools, "tools"), loaded, searched=searched))


def functions(tools: Sequence[FlatTool] | None, place: str) -> Iterator[PlacedTool]:
    """Yield the functions among tools. ``place`` is the name of the tools' list for errors."""
    for number, wire in enumerate(tools or ()):
        if isinstance(wire, FlatFunction | SearchTool):
            yield wire.tool, f"{place}[{number}].name"
        elif isinstance(wire, Namespace):
            for tool, where in functions(wire.tools, f"{place}[{number}].tools"):
                name = joined_name(wire.name, tool.name)
                yield replace(tool, name=name, namespace=wire.name, own_name=tool.name), where


def joined_name(namespace: str, name: str) -> str:
    """Return the function's name for the model. Each separator in a namespace gets a colon before
    it, so that different pairs of names always have different joined names."""
    return f"{SEPARATORS.sub(MARK, namespace)}.{name}"


def tool_object(tool: FlatFunction | Namespace | SearchTool) -> Json:
    if isinstance(tool, SearchTool):
        return tool.model_dump()
    if isinstance(tool, Namespace):
        grouped = [tool_object(one) for one in tool.tools or () if isinstance(one, FlatFunction)]
        return tool.model_dump(exclude={"tools"}) | {"tools": grouped}
    fields = tool.model_dump() | {"strict": bool(tool.strict)}
    return fields if fields.pop("defer_loading") is None else fields | {"defer_loading": True}


def name_object(tool: Tool) -> Json:
    namespace, name = tool.client_name
    return {"name": name} | ({} if namespace is None else {"namespace": namespace})


def tool_choice_object(choice: ToolChoice, tools: Iterable[Tool]) -> Json:
    names = choice.allowed or {choice.name}
    chosen = [{"type": "function"} | name_object(tool) for tool in tools if tool.name in names]
    if choice.allowed is not None:
        return {"type": "allowed_tools", "mode": choice.mode, "tools": chosen}
    return chosen[0]
