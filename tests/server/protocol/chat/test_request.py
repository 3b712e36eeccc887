import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.chat.request import ChatRequest, ContinuationFields, Message
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError, from_validation
from server.text.conversation import (
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
)

LIMITS = LimitsSection(max_messages=3)
UNSUPPORTED = Unsupported("refuse", "images.chat")
USER = {"role": "user", "content": "Hello"}
LOOK = {"type": "function", "function": {"name": "look"}}


def request(**given: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": [USER]} | given))


def conversation(**given: Any) -> Conversation:
    return request(**given).conversation(LIMITS, UNSUPPORTED)


def refusal(**given: Any) -> ApiError:
    """What a request is refused with, by its types or by its meaning."""
    try:
        asked = request(**given)
        asked.check(LIMITS)
        asked.conversation(LIMITS, UNSUPPORTED)
    except ValidationError as error:
        return from_validation(error)
    except ApiError as error:
        return error
    raise AssertionError("it was let pass")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [USER] * 4}, "messages"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [USER, USER | {"content": 5}]}, "messages[1].content"),
        ({"messages": [USER, USER | {"audio": {"id": "a"}}]}, "messages[1].audio"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [LOOK], "tool_choice": "look"}, "tool_choice"),
        ({"tools": LOOK}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"other": [1]}}, "chat_template_kwargs.other"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"n": LIMITS.max_choices + 1}, "n"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_by_name(
    given: dict[str, Any], param: str
) -> None:
    error = refusal(**given)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [USER] * 3},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"tools": [], "functions": [], "tool_choice": "auto"},
        {"chat_template_kwargs": {}},
        {"metadata": {"k": "v"}, "user": "u", "store": True, "service_tier": "auto"},
        {"messages": [USER | {"extra": 1, "name": "me"}]},
        {name: None for name in ChatRequest.model_fields if name != "messages"},
    ],
)
def test_a_request_that_can_be_answered_is_let_pass(given: dict[str, Any]) -> None:
    asked = request(**given)
    asked.check(LIMITS)
    asked.conversation(LIMITS, UNSUPPORTED)


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, (None, "max_tokens")),
        ({"max_tokens": 5}, (5, "max_tokens")),
        ({"max_completion_tokens": 6}, (6, "max_completion_tokens")),
        ({"max_tokens": 5, "max_completion_tokens": 6}, (6, "max_completion_tokens")),
        ({"max_tokens": 5, "max_completion_tokens": None}, (5, "max_tokens")),
    ],
)
def test_the_newer_name_of_the_answers_length_wins(
    given: dict[str, Any], length: tuple[int | None, str]
) -> None:
    assert request(**given).asked_length == length


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "high", "enable_thinking": False}, False),
        ({"thinking_token_budget": 5}, None),
        ({"reasoning": {}}, None),
        ({"reasoning": {"enabled": False, "exclude": True}}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, False),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, False),
    ],
)
def test_thinking_can_be_switched_in_several_ways(
    given: dict[str, Any], enabled: bool | None
) -> None:
    assert conversation(**given).thinking.enabled is enabled


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_budget": 5}, 5),
        ({"thinking_token_budget": 7, "thinking_budget": 5}, 7),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "minimal"}, 512),
        ({"reasoning_effort": "low"}, 2048),
        ({"reasoning_effort": "medium"}, 8192),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "xhigh"}, None),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, 5),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, 2048),
        ({"reasoning": {"effort": "low", "max_tokens": 5.0}}, 5),
        ({"reasoning": {"max_tokens": 5}, "thinking_budget": 7}, 7),
        ({"reasoning": {"max_tokens": None, "effort": None}}, None),
    ],
)
def test_an_effort_is_a_budget_unless_one_is_named(
    given: dict[str, Any], budget: int | None
) -> None:
    assert conversation(**given).thinking.budget == budget


def test_a_request_becomes_the_neutral_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = conversation(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ],
        tools=[LOOK],
        tool_choice="required",
        parallel_tool_calls=False,
        response_format={"type": "json_object"},
        reasoning_effort="low",
    )
    assert asked == Conversation(
        turns=(
            Turn("system", "Be brief."),
            Turn("assistant", "", "Hm.", (ToolCall("1", "look", "{}"),)),
            Turn("tool", "7", tool_call_id="1"),
        ),
        tools=(Tool("look"),),
        tool_choice=ToolChoice("required"),
        parallel_tool_calls=False,
        output=OutputFormat("json_object"),
        thinking=Thinking(True, 2048, "low", budget_is_efforts=True),
    )


def test_a_request_that_says_nothing_leaves_everything_to_the_model() -> None:
    plain = Conversation((Turn("user", "Hello"),), tool_choice=ToolChoice("none"))
    assert conversation() == plain
    assert conversation(tools=[], parallel_tool_calls=None) == plain


LAST = Turn("assistant", "Once")


@pytest.mark.parametrize(
    ("asked", "marked", "continues"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"add_generation_prompt": False}, True, True),
    ],
)
def test_the_message_or_the_request_says_that_it_is_continued(
    asked: dict[str, bool], marked: bool, continues: bool
) -> None:
    fields = ContinuationFields.model_validate(asked)
    assert fields.continues(LAST, marked=marked) is continues


@pytest.mark.parametrize(
    ("asked", "last", "param"),
    [
        ({"continue_final_message": True}, Turn("user", "Hi"), "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            LAST,
            "add_generation_prompt",
        ),
        ({"add_generation_prompt": False}, LAST, "add_generation_prompt"),
    ],
)
def test_what_contradicts_itself_is_refused(asked: dict[str, bool], last: Turn, param: str) -> None:
    fields = ContinuationFields.model_validate(asked)
    with pytest.raises(ApiError) as caught:
        fields.continues(last, marked=False)
    assert caught.value.param == param


def turn(**given: Any) -> Turn:
    return Message.model_validate_json(json.dumps(given)).turn(
        "messages[3]", Unsupported("refuse", "images.chat")
    )


def refusal_message(**given: Any) -> ApiError:
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
    error = refusal_message(role="user", content=[{"type": "text", "text": "a"}, part])
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
    error = refusal_message(role="assistant", tool_calls=calls)
    assert error.param == "messages[3].tool_calls[1]"


def test_earlier_audio_is_refused() -> None:
    assert refusal_message(role="assistant", audio={"id": "a"}).param == "messages[3].audio"
