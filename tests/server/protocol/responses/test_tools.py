import json
from typing import Any

import pytest
from openai.types.responses import Tool as SdkTool
from openai.types.responses import ToolChoiceAllowed, ToolChoiceFunction
from pydantic import TypeAdapter

from server.protocol.chat.tools import read_tool_choice
from server.protocol.responses.tools import (
    FlatTool,
    FlatToolChoice,
    read_flat_tools,
    tool_choice_object,
    tool_object,
)
from server.protocol.wire_errors import ApiError
from server.text.conversation import Tool, ToolChoice

TOOLS: TypeAdapter[Any] = TypeAdapter(list[FlatTool])
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
OTHERS = [
    {"type": "namespace", "name": "n", "description": 5, "tools": [LOOK]},
    {"type": "web_search", "filters": None},
    {"type": "custom", "name": "look", "format": {"type": "text"}},
    {"type": "mcp", "server_label": "x", "parameters": "none"},
]


def read(*given: Any, max_tools: int = 8) -> tuple[Tool, ...]:
    return read_flat_tools(TOOLS.validate_json(json.dumps(given)), max_tools)


def chosen(given: Any, *names: str) -> ToolChoice:
    choice = FlatToolChoice.model_validate_json(json.dumps(given))
    return read_tool_choice(choice, tuple(Tool(name) for name in names))


def test_functions_are_read_and_what_is_none_is_left_out() -> None:
    found = read(*OTHERS, LOOK, {"type": "function", "name": "wait", "description": "Waits."})
    assert found == (
        Tool("look", None, {"type": "object"}, strict=True),
        Tool("wait", "Waits.", None),
    )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([LOOK, LOOK], "tools[1].name"),
        ([*OTHERS, LOOK | {"name": "a b"}], "tools[4].name"),
        ([LOOK] * 9, "tools"),
        (OTHERS * 3, "tools"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(*given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "function", "name": "look"}, ToolChoice("named", "look")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [LOOK]},
            ToolChoice("required", allowed=frozenset({"look"})),
        ),
        ({"type": "allowed_tools", "tools": [LOOK]}, ToolChoice(allowed=frozenset({"look"}))),
    ],
)
def test_choices_are_flat_and_are_repeated_as_the_sdk_types_them(
    given: Any, choice: ToolChoice
) -> None:
    assert chosen(given, "look", "wait") == choice
    said = tool_choice_object(choice)
    kind = ToolChoiceFunction if choice.mode == "named" else ToolChoiceAllowed
    assert kind.model_validate(said, strict=True).to_dict() == said
    assert chosen(said, "look", "wait") == choice


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "custom", "name": "look"}, "tool_choice"),
        ({"type": "function", "name": "none"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "never", "tools": [LOOK]}, "tool_choice.mode"),
        ({"type": "allowed_tools"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "tools": [LOOK, OTHERS[1]]}, "tool_choice.tools[1]"),
    ],
)
def test_a_choice_of_what_is_no_function_is_refused(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chosen(given, "look")
    assert caught.value.param == param


@pytest.mark.parametrize("tool", [Tool("look"), Tool("look", "Looks.", {"type": "object"}, True)])
def test_a_function_is_repeated_as_it_was_sent(tool: Tool) -> None:
    said = tool_object(tool)
    assert read(said) == (tool,)
    sdk: TypeAdapter[Any] = TypeAdapter(SdkTool)
    assert sdk.validate_python(said).to_dict() == said
