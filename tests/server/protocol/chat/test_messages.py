import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.protocol.chat.request import Message
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import ToolCall, Turn


def turn(**given: Any) -> Turn:
    return Message.model_validate_json(json.dumps(given)).turn(
        "messages[3]", Unsupported("refuse", "images.chat")
    )


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        turn(**given)
    return caught.value


@pytest.mark.parametrize(
    ("role", "neutral"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_every_role_has_its_neutral_one(role: str, neutral: str) -> None:
    assert turn(role=role, content="x", name="somebody").role == neutral


def test_another_role_is_refused() -> None:
    with pytest.raises(ValidationError):
        turn(role="robot", content="x")


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_are_joined(kind: str) -> None:
    parts = [{"type": kind, "text": "Hel"}, {"type": kind, "text": "lo", "cache_control": {}}]
    assert turn(role="user", content=parts) == Turn("user", "Hello")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "text"}]}, ""),
        ({"content": [{"type": "text", "text": None}, {"type": "text", "text": "Yes."}]}, "Yes."),
        ({"content": [{"type": "refusal", "text": "No."}]}, ""),
        ({"content": ["Yes", {"type": "text", "text": "."}]}, "Yes."),
        ({"content": [""]}, ""),
    ],
)
def test_a_message_may_say_nothing_or_be_a_refusal(message: dict[str, Any], text: str) -> None:
    assert turn(role="assistant", **message) == Turn("assistant", text)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_place(part: dict[str, Any]) -> None:
    error = refusal(role="user", content=[{"type": "text", "text": "a"}, part])
    assert (error.status, error.param) == (400, "messages[3].content[1]")
    assert part["type"] in error.message


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_come_back_under_both_names(name: str) -> None:
    said = {"role": "assistant", "content": "Yes."}
    assert turn(**said, **{name: "Hm."}) == Turn("assistant", "Yes.", "Hm.")
    both = {"reasoning": "Hm.", "reasoning_content": "Hm.", name: None}
    assert turn(**said, **both) == Turn("assistant", "Yes.", "Hm.")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a": 1}', '{"a": 1}'), ("", ""), (None, ""), ({"a": "é"}, '{"a": "é"}'), ("{", "{")],
)
def test_earlier_calls_keep_their_arguments_as_they_were_written(arguments: Any, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert turn(role="assistant", tool_calls=[call]).tool_calls == (ToolCall("1", "f", text),)


def test_the_older_form_of_a_call_is_one() -> None:
    call = {"name": "f", "arguments": "{}"}
    assert turn(role="assistant", function_call=call).tool_calls == (ToolCall("", "f", "{}"),)
    nameless = {"function": {"name": "f"}}
    assert turn(role="assistant", tool_calls=[nameless]).tool_calls == (ToolCall("", "f", ""),)


def test_a_tools_answer_knows_its_call() -> None:
    assert turn(role="tool", content="7", tool_call_id="1") == Turn("tool", "7", tool_call_id="1")


def test_a_call_of_another_type_is_refused_by_its_place() -> None:
    calls = [{"function": {"name": "f"}}, {"id": "2", "type": "custom", "custom": {"name": "g"}}]
    error = refusal(role="assistant", tool_calls=calls)
    assert error.param == "messages[3].tool_calls[1]"


def test_earlier_audio_is_refused() -> None:
    assert refusal(role="assistant", audio={"id": "a"}).param == "messages[3].audio"
