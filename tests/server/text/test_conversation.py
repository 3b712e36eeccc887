import pytest

from server.text.conversation import Conversation, Tool, ToolChoice

TOOLS = (Tool("look"), Tool("read"), Tool("write"))


@pytest.mark.parametrize(
    ("choice", "offered", "callable_names"),
    [
        (ToolChoice(), 3, ["look", "read", "write"]),
        (ToolChoice("required"), 3, ["look", "read", "write"]),
        (ToolChoice("named", "read"), 3, ["read"]),
        (ToolChoice("auto", allowed=frozenset({"read", "look"})), 3, ["look", "read"]),
        (ToolChoice("none"), 0, []),
    ],
)
def test_a_model_is_told_of_all_tools_or_of_none(
    choice: ToolChoice, offered: int, callable_names: list[str]
) -> None:
    asked = Conversation((), TOOLS, choice)
    assert len(asked.offered_tools) == offered
    assert [tool.name for tool in asked.callable_tools] == callable_names


@pytest.mark.parametrize(
    ("choice", "parallel", "max_calls"),
    [
        (ToolChoice(), True, None),
        (ToolChoice("required"), True, None),
        (ToolChoice("required"), False, 1),
        (ToolChoice("named", "read"), True, 1),
    ],
)
def test_a_tool_that_is_named_is_called_once(
    choice: ToolChoice, parallel: bool, max_calls: int | None
) -> None:
    asked = Conversation((), TOOLS, choice, parallel_tool_calls=parallel)
    assert asked.max_calls == max_calls
