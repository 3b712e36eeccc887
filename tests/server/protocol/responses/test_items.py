import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter, ValidationError

from server.config import UnseenRule
from server.protocol.common import WireModel
from server.protocol.responses.items import (
    Input,
    Item,
    MessageItem,
    Placed,
    check_begun,
    is_begun,
    packed_reasoning,
    read_input,
    read_reasoning,
    turns,
)
from server.protocol.unsupported import MAX_KINDS, Unsupported
from server.protocol.wire_errors import ApiError, from_validation
from server.text.conversation import ToolCall, Turn

INPUT: TypeAdapter[Any] = TypeAdapter(Input)
SDK: TypeAdapter[Any] = TypeAdapter(ResponseItem)
CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'}
MADE = ToolCall("call_1", "look", '{"at": 1}')
ASKED = {"role": "user", "content": "Hello"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
DESCRIBED = '{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}\n'
HEARD = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}


class Body(WireModel):
    input: Input


def said(text: str) -> dict[str, Any]:
    """What an answer's message looks like."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    """What an answer's thoughts look like."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def items(given: Any) -> list[Item]:
    return [item for _, item in placed(given, unsupported())]


def unsupported(rule: UnseenRule = "refuse") -> Unsupported:
    return Unsupported(rule, "images.responses", "responses")


def placed(given: Any, notes: Unsupported) -> list[Placed]:
    return read_input(INPUT.validate_json(json.dumps(given)), lambda _: None, notes)


def read(*given: Any, rule: UnseenRule = "refuse") -> tuple[Turn, ...]:
    notes = unsupported(rule)
    return turns(placed(list(given), notes), notes)


def refusal(*given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(*given)
    assert caught.value.status == 400
    return caught.value


# --- turns -----------------------------------------------------------------------------------


def test_a_text_is_what_the_user_says() -> None:
    assert items("Hello") == [MessageItem(role="user", content="Hello")]
    assert turns([("input", item) for item in items("")], Unsupported("refuse", "")) == (
        Turn("user", ""),
    )


@pytest.mark.parametrize(
    ("role", "as_turn"),
    [("user", "user"), ("assistant", "assistant"), ("system", "system"), ("developer", "system")],
)
@pytest.mark.parametrize("typed", [{}, {"type": "message"}, {"type": None, "id": "msg_1"}])
@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        [{"type": "input_text", "text": "Hel"}, {"type": "output_text", "text": "lo"}],
        [{"type": "text", "text": "Hello", "annotations": [], "cache": 1}],
    ],
)
def test_messages_may_be_short_or_complete(
    role: str, as_turn: Any, typed: Any, content: Any
) -> None:
    assert read({"role": role, "content": content} | typed) == (Turn(as_turn, "Hello"),)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"text": "b"}]}, "ab"),
        ({"encrypted_content": packed_reasoning("Grüße")}, "Grüße"),
        (
            {"content": None, "summary": [{"type": "summary_text", "text": "s"}, {"text": "t"}]},
            "s\n\nt",
        ),
        (
            {"content": [{"text": "a"}], "encrypted_content": "gAAAA", "summary": [{"text": "s"}]},
            "a",
        ),
        ({"encrypted_content": packed_reasoning("p"), "summary": [{"text": "s"}]}, "p"),
        ({"encrypted_content": ""}, ""),
        ({}, ""),
    ],
)
def test_thoughts_come_back_in_the_best_form_that_is_there(fields: Any, text: str) -> None:
    assert read({"type": "reasoning"} | fields) == (Turn("assistant", reasoning=text),)


@pytest.mark.parametrize("packed", ["gAAAAABo", "quire1.%", "quire1.YQ", "quire1./w==", "quire1.é"])
def test_thoughts_that_were_packed_elsewhere_are_left_out(packed: str) -> None:
    assert read_reasoning(packed) is None
    thought, notes = {"type": "reasoning", "encrypted_content": packed}, unsupported()
    assert [place for place, _ in placed([thought, ASKED, thought], notes)] == ["input[1]"]
    assert notes.left_out == {"reasoning": 2}
    summed = thought | {"summary": [{"type": "summary_text", "text": "It looked."}]}
    assert read(summed) == (Turn("assistant", reasoning="It looked."),)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("sunny", "sunny"),
        ([{"type": "input_text", "text": "sun"}, {"type": "text", "text": "ny"}], "sunny"),
        (None, ""),
    ],
)
def test_what_came_of_a_call_is_text_or_parts(output: Any, text: str) -> None:
    (turn,) = read(HEARD | {"output": output})
    assert turn == Turn("tool", text, tool_call_id="call_1")


def test_arguments_may_come_as_the_object_that_they_are() -> None:
    (turn,) = read({"type": "function_call", "name": "look", "arguments": {"at": 1}})
    assert turn.tool_calls == (ToolCall("", "look", '{"at": 1}'),)


def called(name: str, arguments: str) -> Turn:
    return Turn("assistant", tool_calls=(ToolCall("c", name, arguments),))


@pytest.mark.parametrize(
    ("item", "turn"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** é"},
            called("apply_patch", '{"input": "*** é"}'),
        ),
        (
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
            Turn("tool", "Done", tool_call_id="c"),
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            called("local_shell", '{"command": ["ls"]}'),
        ),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            Turn("tool", "a.txt", tool_call_id="c"),
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
            called("tool_search", '{"query": "x"}'),
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "arguments": '{"query": "x"}'},
            called("tool_search", '{"query": "x"}'),
        ),
        (
            CALL | {"call_id": "c", "namespace": "mcp__x", "arguments": "{}"},
            called("mcp__x.look", "{}"),
        ),
        (
            {
                "type": "agent_message",
                "author": "worker a",
                "content": [
                    {"type": "input_text", "text": "Payload:\n"},
                    {"type": "encrypted_content", "encrypted_content": "Look at it."},
                    {"type": "encrypted_content", "encrypted_content": "gAAAAABo"},
                ],
            },
            Turn("user", "Message from worker a:\nPayload:\nLook at it."),
        ),
        (
            {"type": "agent_message", "author": "/root", "content": "Go on."},
            Turn("user", "Message from /root:\nGo on."),
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "arguments": ["x"]},
            called("tool_search", '{"input": null}'),
        ),
        (
            {"type": "tool_search_output", "call_id": "c", "tools": [LOOK, {"type": "custom"}]},
            Turn("tool", DESCRIBED, tool_call_id="c"),
        ),
        ({"type": "additional_tools", "tools": [LOOK]}, Turn("system", DESCRIBED)),
    ],
)
def test_what_agents_keep_is_read(item: Any, turn: Turn) -> None:
    assert read(item) == (turn,)
    kept = items([item])[0].stored_form("1f")
    assert read(kept) == (turn,)
    assert items([kept])[0].stored_form("2f") == kept


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "computer_call", "action": 5},
        {"type": "mcp_call", "name": 5, "output": {"a": 1}},
        {"type": "shell_call_output", "output": [{"stdout": "x"}]},
        {"type": "image_generation_call", "result": None},
    ],
)
def test_what_cannot_be_read_is_left_out_with_its_name(item: Any) -> None:
    notes = unsupported()
    assert turns(placed([ASKED, item, ASKED], notes), notes) == (Turn("user", "Hello"),) * 2
    assert notes.left_out == {item["type"]: 1}
    assert read(ASKED, {"type": "additional_tools", "tools": []}) == (Turn("user", "Hello"),)
    others = [{"type": f"zebra_{n}", "content": 5} for n in range(20)] + [{"type": "a=1, b"}]
    placed(others, notes)
    assert (len(notes.left_out), notes.left_out["unknown"]) == (MAX_KINDS + 1, 21 - MAX_KINDS + 1)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0]"),
        (HEARD | {"output": [{"type": "input_file"}]}, "input[1].output[0]"),
        ({"type": "item_reference", "id": "msg_none"}, "input[1]"),
        ({"id": "msg_none"}, "input[1]"),
        ({"type": None, "id": "msg_none"}, "input[1]"),
    ],
)
def test_what_cannot_be_part_of_a_conversation_is_named(item: Any, param: str) -> None:
    assert refusal(ASKED, item).param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (5, "input"),
        ([5], "input[0]"),
        ([{"content": "x"}], "input[0].role"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"type": 5}], "input[0].type"),
        ([ASKED, {"type": "function_call"}], "input[1].name"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([{"type": "reasoning", "content": "x"}], "input[0].content"),
    ],
)
def test_an_item_of_the_wrong_form_is_named(given: Any, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate_json(json.dumps({"input": given}))
    assert from_validation(caught.value).param == param


def test_a_reference_is_followed() -> None:
    kept = MessageItem(role="user", content="Hello")
    given = INPUT.validate_json('[{"type": "item_reference", "id": "a"}, {"id": "b"}]')
    found = read_input(given, {"a": kept, "b": kept}.get, unsupported())
    assert found == [("input[0]", kept), ("input[1]", kept)]


# --- how items are kept ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "item",
    [
        ASKED,
        {"role": "user"},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        said("Yes."),
        thought("Hm."),
        {"type": "reasoning", "encrypted_content": packed_reasoning("Hm.")},
        CALL,
        CALL | {"arguments": {"at": 1}},
        HEARD,
        HEARD | {"output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "function_call_output"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        HEARD | {"output": [{"type": "input_file", "file_data": "x", "filename": "a.pdf"}]},
    ],
)
def test_what_is_kept_says_the_same_and_is_complete(item: Any) -> None:
    kept = items([item])[0].stored_form("1f")
    assert kept["id"] == item.get("id") or kept["id"].endswith("_1f")
    assert read(kept, rule="placeholder") == read(item, rule="placeholder")
    assert items([kept])[0].stored_form("2f") == kept
    found = SDK.validate_python(kept)
    assert found.to_dict() == kept


BEGUN = {"prefix": True}
UNSUPPORTED = Unsupported("refuse", "images.responses", "responses")


def placed_turn(*given: Any) -> list[Placed]:
    return read_input(INPUT.validate_json(json.dumps(given)), lambda _: None, UNSUPPORTED)


def read_turn(*given: Any) -> tuple[Turn, ...]:
    return turns(placed_turn(*given), UNSUPPORTED)


def test_the_items_of_one_turn_are_one_turn() -> None:
    other = CALL | {"call_id": "call_2"}
    assert read_turn(ASKED, thought("Hm."), said("Sure."), CALL, other, HEARD) == (
        Turn("user", "Hello"),
        Turn("assistant", "Sure.", "Hm.", (MADE, ToolCall("call_2", "look", '{"at": 1}'))),
        Turn("tool", "sunny", tool_call_id="call_1"),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([CALL, HEARD, CALL], [("", "", 1), ("sunny", "", 0), ("", "", 1)]),
        ([said("a"), CALL, said("b")], [("ab", "", 1)]),
        ([said("a"), said("b")], [("a", "", 0), ("b", "", 0)]),
        ([thought("a"), thought("b"), said("c")], [("c", "a\nb", 0)]),
        ([said("a"), thought("b"), said("c")], [("a", "", 0), ("c", "b", 0)]),
        ([CALL, thought("b"), CALL], [("", "", 1), ("", "b", 1)]),
        ([ASKED, ASKED], [("Hello", "", 0), ("Hello", "", 0)]),
        ([HEARD, HEARD], [("sunny", "", 0), ("sunny", "", 0)]),
        (
            [said("a"), ASKED, said("b")],
            [("a", "", 0), ("Hello", "", 0), ("b", "", 0)],
        ),
        ([], []),
    ],
)
def test_a_turn_ends_where_another_one_must_have_begun(given: Any, expected: Any) -> None:
    found = [(turn.text, turn.reasoning, len(turn.tool_calls)) for turn in read_turn(*given)]
    assert found == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([said("a") | BEGUN, said("b")], [("ab", "", 0)]),
        (
            [said("a") | BEGUN, said("b") | BEGUN, said("c"), said("d")],
            [("abc", "", 0), ("d", "", 0)],
        ),
        ([thought("a") | BEGUN, thought("b"), said("c")], [("c", "ab", 0)]),
        ([thought("a"), said("b") | BEGUN, CALL], [("b", "a", 1)]),
        ([said("a") | BEGUN, ASKED], [("a", "", 0), ("Hello", "", 0)]),
    ],
)
def test_what_goes_on_with_an_item_is_the_same_turn(given: Any, expected: Any) -> None:
    found = [(turn.text, turn.reasoning, len(turn.tool_calls)) for turn in read_turn(*given)]
    assert found == expected


@pytest.mark.parametrize(
    "given",
    [
        [said("a") | BEGUN, ASKED],
        [thought("a") | BEGUN, HEARD],
        [said("a") | BEGUN, HEARD, CALL],
    ],
)
def test_nobody_else_goes_on_with_an_item(given: Any) -> None:
    with pytest.raises(ApiError) as caught:
        check_begun(placed_turn(*given))
    assert caught.value.param == "input[0].prefix"


def test_only_the_assistant_begins_an_answer() -> None:
    check_begun(
        placed_turn(
            said("a") | BEGUN,
            thought("b") | BEGUN,
            CALL,
            HEARD,
            said("c") | BEGUN,
        )
    )
    assert [
        is_begun(item) for _, item in placed_turn(said("a") | BEGUN, said("a"), CALL | BEGUN)
    ] == [
        True,
        False,
        False,
    ]
    with pytest.raises(ApiError) as caught:
        read_turn(ASKED | BEGUN)
    assert caught.value.param == "input[0].prefix"
