import json
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from server.protocol.chat.tools import (
    AsWord,
    WireTool,
    WireToolChoice,
    read_tool_choice,
    read_tools,
)
from server.protocol.wire_errors import ApiError
from server.text.conversation import Tool, ToolChoice

TOOLS = (Tool("look"), Tool("read"))
CHOICE = TypeAdapter[Any](Annotated[str | WireToolChoice | None, AsWord])


def tools(*given: Any) -> tuple[Tool, ...]:
    wire = [WireTool.model_validate_json(json.dumps(each)) for each in given]
    return read_tools(wire)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def choice(given: Any, among: tuple[Tool, ...] = TOOLS) -> ToolChoice:
    return read_tool_choice(CHOICE.validate_json(json.dumps(given)), among)


def test_tools_keep_their_order_and_their_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}
    assert tools(
        function(name="look", description="Looks.", parameters=schema, strict=True),
        function(name="mcp__server-1.x:do/it", description=None, parameters=None, strict=None),
        {"function": {"name": "read"}},
    ) == (Tool("look", "Looks.", schema, True), Tool("mcp__server-1.x:do/it"), Tool("read"))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "tools[1]"),
        ({"type": "web_search"}, "tools[1]"),
        ({"type": "custom", "function": {"name": "f"}}, "tools[1]"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "name": "f"}, "tools[1].function"),
        (function(name="look"), "tools[1].function.name"),
        (function(name=""), "tools[1].function.name"),
        (function(name="a b"), "tools[1].function.name"),
        (function(name='a"b'), "tools[1].function.name"),
        (function(name="a>b"), "tools[1].function.name"),
        (function(name="é"), "tools[1].function.name"),
        (function(name="x" * 129), "tools[1].function.name"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused_by_its_place(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        tools(function(name="look"), given)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_too_many_tools_are_refused_with_both_numbers() -> None:
    with pytest.raises(ApiError) as caught:
        tools(*(function(name=f"f{n}") for n in range(257)))
    assert caught.value.message == "There are 257 tools; at most 256 are read."


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "required"}, ToolChoice("required")),
        ({"type": "required", "name": None}, ToolChoice("required")),
        ({"type": "auto", "disable_parallel_tool_use": False}, ToolChoice("auto")),
        ({"type": "function", "function": {"name": "read"}}, ToolChoice("named", "read")),
        ({"type": "function", "name": "read"}, ToolChoice("named", "read")),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [function(name="read")]},
            },
            ToolChoice("auto", allowed=frozenset({"read"})),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "name": "read"}]},
            },
            ToolChoice("auto", allowed=frozenset({"read"})),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [function(name="look"), function(name="read")],
                },
            },
            ToolChoice("required", allowed=frozenset({"look", "read"})),
        ),
    ],
)
def test_a_choice_is_read_in_all_its_forms(given: Any, read: ToolChoice) -> None:
    assert choice(given) == read


@pytest.mark.parametrize("given", [None, "auto", "none"])
def test_without_tools_nothing_is_called(given: str | None) -> None:
    assert choice(given, ()) == ToolChoice("none")


ALLOWED = "tool_choice.allowed_tools"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("any", "tool_choice"),
        ({"type": "function", "function": {"name": "write"}}, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "custom", "custom": {"name": "look"}}, "tool_choice"),
        ({"type": "allowed_tools"}, f"{ALLOWED}.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, f"{ALLOWED}.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "custom"}]}},
            f"{ALLOWED}.tools[0]",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "some", "tools": [function(name="look")]},
            },
            f"{ALLOWED}.mode",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [function(name="look"), function(name="write")]},
            },
            "tool_choice",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        choice(given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("given", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_call_without_tools_is_refused(given: Any) -> None:
    with pytest.raises(ApiError) as caught:
        choice(given, ())
    assert "there are no tools" in caught.value.message
