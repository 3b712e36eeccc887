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
    name_object,
    read_flat_tools,
    tool_choice_object,
    tool_object,
)
from server.protocol.wire_errors import ApiError
from server.text.conversation import Tool, ToolChoice

TOOLS: TypeAdapter[Any] = TypeAdapter(list[FlatTool])
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def read(*given: Any) -> tuple[Tool, ...]:
    return read_flat_tools(TOOLS.validate_json(json.dumps(given)), ())


def group(namespace: str, *names: str, **more: Any) -> dict[str, Any]:
    functions = [{"type": "function", "name": name} | more for name in names]
    return {"type": "namespace", "name": namespace, "description": "Tools.", "tools": functions}


def chosen(given: Any, *names: str) -> ToolChoice:
    choice = FlatToolChoice.model_validate_json(json.dumps(given))
    return read_tool_choice(choice, tuple(Tool(name) for name in names))


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
    said = tool_choice_object(choice, (Tool("look"), Tool("wait")))
    kind = ToolChoiceFunction if choice.mode == "named" else ToolChoiceAllowed
    assert kind.model_validate(said, strict=True).to_dict() == said
    assert chosen(said, "look", "wait") == choice


@pytest.mark.parametrize(
    "given",
    [
        LOOK,
        {"type": "function", "name": "wait", "description": "Waits.", "defer_loading": True},
        group("crm", "find", strict=False, description="Finds.", parameters={"type": "object"}),
        group("crm"),
    ],
)
def test_a_tool_is_repeated_as_it_was_sent(given: Any) -> None:
    (tool,) = TOOLS.validate_json(json.dumps([given]))
    said = tool_object(tool)
    assert said == said | given
    assert read(said) == read(given)
    sdk: TypeAdapter[Any] = TypeAdapter(SdkTool)
    assert sdk.validate_python(said).to_dict() == said


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b__c"), ("a__b", "c")),
        (("a.b", "c"), ("a", "b.c")),
        (("a:.b", "c"), ("a", "b.c")),
        (("a.", "b"), ("a", ".b")),
        (("a:", ".b"), ("a", ".b")),
        (("a::", "b"), ("a:.", "b")),
        (("mcp__x", "y"), ("mcp", "x__y")),
        (("a" * 64, "b" * 64), ("a" * 63, "ab" + "b" * 62)),
    ],
)
def test_functions_of_namespaces_keep_apart_whatever_their_names_have(one: Any, other: Any) -> None:
    found = read(group(*one), group(*other))
    assert len({tool.name for tool in found}) == 2
    assert [tool.client_name for tool in found] == [one, other]
    for tool in found:
        namespace, name = tool.client_name
        assert name_object(tool) == {"name": name, "namespace": namespace}
        given = {"type": "function", "name": name, "namespace": namespace}
        for choice in (given, {"type": "allowed_tools", "tools": [given]}):
            wire = FlatToolChoice.model_validate_json(json.dumps(choice))
            read_back = read_tool_choice(wire, found)
            assert tool.name in (read_back.name, *(read_back.allowed or ()))
            said = tool_choice_object(read_back, found)
            assert said | choice == said


def test_a_choice_may_name_a_whole_namespace() -> None:
    found = read(LOOK, group("crm", "find", "add"))
    given = FlatToolChoice(type="namespace", name="crm")
    names = frozenset({"crm.find", "crm.add"})
    assert read_tool_choice(given, found) == ToolChoice("required", allowed=names)
    for wrong in ({"name": "find"}, {"name": "look", "namespace": "crm"}, {"name": "crm.find"}):
        with pytest.raises(ApiError):
            read_tool_choice(FlatToolChoice.model_validate({"type": "function"} | wrong), found)
    with pytest.raises(ApiError):
        read_tool_choice(FlatToolChoice(type="namespace", name="other"), found)


def test_deferred_tools_are_read_as_such_unless_the_server_is_to_search_them() -> None:
    late, search = LOOK | {"defer_loading": True}, {"type": "tool_search"}
    assert [tool.deferred for tool in read(late, group("n", "a", defer_loading=True))] == [True] * 2
    assert [tool.deferred for tool in read(search, late)] == [False]
