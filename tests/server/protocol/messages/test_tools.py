from typing import Any

import pytest

from server.protocol.messages.request import OfferedChoice, OfferedTool, read_custom_tools
from server.protocol.wire_errors import ApiError
from server.text.conversation import Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, WAIT = Tool("look"), Tool("wait")


def read(*tools: dict[str, Any]) -> tuple[Tool, ...]:
    return read_custom_tools([OfferedTool.model_validate(tool) for tool in tools], ())


def chosen(tools: tuple[Tool, ...], **choice: Any) -> ToolChoice:
    return OfferedChoice.model_validate(choice).read(tools)


def test_tools_keep_their_order_and_all_that_is_said_of_them() -> None:
    look = {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "strict": True}
    marked = {"name": "wait", "type": "custom", "cache_control": {"type": "ephemeral"}}
    assert read(look, marked) == (Tool("look", "Looks.", SCHEMA, True), Tool("wait"))
    assert read() == ()


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20250305",
        "web_fetch_20250910",
        "code_execution_20250825",
        "tool_search_tool_regex_20251119",
        "mcp_toolset",
        "advisor_20260301",
    ],
)
def test_what_anthropics_servers_run_is_left_out(kind: str) -> None:
    assert read({"type": kind, "name": "look"}, {"name": "look"}) == (LOOK,)
    with pytest.raises(ApiError) as caught:
        chosen(read({"type": kind, "name": "look"}), type="tool", name="look")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "bash_20250124", "name": "bash"}], "tools[0]"),
        ([{"type": "computer_toolset_20260801"}], "tools[0]"),
        ([{"type": "", "name": "f"}], "tools[0]"),
        ([{"input_schema": SCHEMA}], "tools[0].name"),
        ([{"name": "a b"}], "tools[0].name"),
        ([{"name": "f"}, {"name": "f"}], "tools[1].name"),
        ([{"name": f"f{n}"} for n in range(257)], "tools"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_place(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(*tools)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "wait"}, ToolChoice("named", "wait")),
    ],
)
def test_a_choice_is_one_of_four(choice: dict[str, Any], read: ToolChoice) -> None:
    assert chosen((LOOK, WAIT), **choice) == read


def test_without_tools_nothing_is_called() -> None:
    assert chosen((), type="auto") == chosen((), type="none") == ToolChoice("none")
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        with pytest.raises(ApiError) as caught:
            chosen((), **choice)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", [None, "LOOK"])
def test_a_tool_that_is_not_there_cannot_be_chosen(name: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        chosen((LOOK,), type="tool", name=name)
    assert caught.value.param == "tool_choice.name"
