import threading
from typing import Any

import pytest

from server.text.calls.written import (
    MAX_AROUND_CHARS,
    CallMarks,
    MarkError,
    WrittenCall,
    WrittenCalls,
    same_arguments,
    same_value,
)
from server.text.conversation import Conversation, Tool, ToolCall, Turn

TEXT = '<tool_call>\n{"name":"look","arguments":{"at":1}}\n</tool_call>'


def written(number: int = 0, name: str = "look", arguments: str = '{"at":1}') -> WrittenCall:
    return WrittenCall(f"call_{number}", name, arguments, TEXT)


def recalled(calls: WrittenCalls, *made: ToolCall) -> list[str | None]:
    """The texts that are known."""
    asked = Conversation((Turn("user", "Hello"), Turn("assistant", tool_calls=made)))
    found = calls.recall(asked)
    assert found.turns[0] == asked.turns[0]
    assert [(call.id, call.name, call.arguments) for call in found.turns[1].tool_calls] == [
        (call.id, call.name, call.arguments) for call in made
    ]
    return [call.written for call in found.turns[1].tool_calls]


def test_a_call_that_comes_back_is_recalled_by_its_id() -> None:
    calls = WrittenCalls(1000)
    calls.remember(written(1))
    same = ToolCall("call_1", "look", '{ "at": 1.0 }')
    assert recalled(calls, same, ToolCall("call_2", "look", '{"at": 1}')) == [TEXT, None]


@pytest.mark.parametrize(
    ("name", "arguments"), [("wait", '{"at":1}'), ("look", '{"at":2}'), ("look", ""), ("look", "[")]
)
def test_a_call_that_was_changed_is_not_recalled(name: str, arguments: str) -> None:
    calls = WrittenCalls(1000)
    calls.remember(written(1))
    assert recalled(calls, ToolCall("call_1", name, arguments)) == [None]


@pytest.mark.parametrize(
    ("arguments", "is_known"),
    [
        ('{"all": false, "at": 1}', True),
        ('{"at": 1, "all": false, "mode": "w", "n": null}', True),
        ('{"at": 1, "n": null}', True),
        ('{"at": 1, "mode": "w", "all": true}', False),
        ('{"at": 1, "mode": "r"}', False),
        ('{"at": 1, "n": 0}', False),
        ('{"at": 1, "more": null}', False),
        ('{"at": 2, "all": false}', False),
    ],
)
def test_a_client_may_write_the_defaults_of_a_tool_into_a_call(
    arguments: str, is_known: bool
) -> None:
    calls = WrittenCalls(10_000)
    calls.remember(written())
    properties = {
        "at": {"type": "integer"},
        "all": {"type": "boolean", "default": False},
        "mode": {"enum": ["r", "w"], "default": "w"},
        "n": {"default": None},
        "odd": True,
    }
    tool = Tool("look", parameters={"type": "object", "properties": properties})
    turn = Turn("assistant", tool_calls=(ToolCall("call_0", "look", arguments),))
    (found,) = calls.recall(Conversation((turn,), tools=(tool,))).turns[0].tool_calls
    assert (found.written is not None) == is_known


def test_no_more_is_kept_than_fits_and_what_was_asked_for_last_stays() -> None:
    calls = WrittenCalls(2 * written().size)
    made = [ToolCall(f"call_{number}", "look", '{"at": 1}') for number in range(3)]
    calls.remember(written(0))
    calls.remember(written(1))
    assert recalled(calls, made[0]) == [TEXT]
    calls.remember(written(2))
    assert recalled(calls, *made) == [TEXT, None, TEXT]
    calls.remember(written(3, arguments="x" * 1000))
    assert recalled(calls, *made) == [TEXT, None, TEXT]
    calls.remember(written(1))
    assert recalled(calls, made[1]) == [TEXT], "what did not fit has left nothing behind"


def test_nothing_is_kept_where_nothing_may_be() -> None:
    calls = WrittenCalls(0)
    calls.remember(written(0))
    assert recalled(calls, ToolCall("call_0", "look", '{"at":1}')) == [None]


def test_prompts_are_made_while_calls_are_remembered() -> None:
    calls = WrittenCalls(20 * written().size)
    made = ToolCall("call_0", "look", '{"at":1}')

    def remember() -> None:
        for number in range(2000):
            calls.remember(written(number))

    writer = threading.Thread(target=remember)
    writer.start()
    while writer.is_alive():
        assert recalled(calls, made) in ([TEXT], [None])
    writer.join()


# --- what is the same ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("{}", "{}", True),
        ("{}", "", False),
        ('{"a": 1', '{"a": 1', True),
        ('{"a": 1', '{"a":1', False),
        ('{"a":1,"b":[1,2]}', '{ "b": [1, 2], "a": 1e0 }', True),
        ('{"a": "\\u00e9\\/"}', '{"a": "é/"}', True),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}', True),
    ],
)
def test_arguments_are_the_same_however_they_are_written(one: str, other: str, same: bool) -> None:
    assert same_arguments(one, other) is same_arguments(other, one) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (0, None),
        (1, "1"),
        (1, 2),
        ([1], [True]),
        ([1], [1, 1]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": [0]}, {"a": [False]}),
        ([], {}),
        ("", []),
    ],
)
def test_values_that_differ_are_not_the_same(one: Any, other: Any) -> None:
    assert not same_value(one, other)
    assert not same_value(other, one)
    assert same_value(one, one)
    assert same_value(other, other)


ONE = '<tool_call>\n{"name":"look"}\n</tool_call>'
TWO = "<function=wait>\n</function>\n</tool_call>"


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


def xml(name: str) -> str:
    return f"<tool_call>\n<function={name}>\n</function>\n</tool_call>"


def test_what_a_template_makes_of_marks_is_replaced() -> None:
    marks = CallMarks(str)
    assert not marks
    one, two = marks.add(ONE), marks.add(TWO)
    assert marks
    between = "call: <tool_call> ... </tool_call>; "
    prompt = f"{between}{hermes(one)}, {hermes('other')}{between}{xml(two)}{between}"
    assert marks.replace(prompt) == f"{between}{ONE}, {hermes('other')}{between}{TWO}{between}"


def test_two_prompts_have_no_mark_in_common() -> None:
    assert CallMarks(str).add(ONE) != CallMarks(str).add(ONE)


def test_more_than_ten_calls_are_told_apart() -> None:
    marks = CallMarks(str)
    names = [marks.add(f"<{number}>") for number in range(12)]
    assert marks.replace("".join(map(hermes, names))) == "".join(f"<{n}>" for n in range(12))


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "{0}{1}{1}",
        "{0}<tool_call>name</tool_call>",
        "{1}{0}",
        "<tool_call>" + "." * MAX_AROUND_CHARS + "{mark0}</tool_call>{1}",
        "<tool_call>{mark0}" + "." * MAX_AROUND_CHARS + "</tool_call>{1}",
        "{mark0}</tool_call>{1}",
        "{1}<tool_call>{mark0}",
        "<tool_call>{mark0}{mark1}</tool_call>",
    ],
)
def test_a_template_that_does_more_with_calls_is_found_out(prompt: str) -> None:
    marks = CallMarks(str)
    names = [marks.add(ONE), marks.add(TWO)]
    with pytest.raises(MarkError):
        marks.replace(prompt.format(*map(hermes, names), mark0=names[0], mark1=names[1]))
