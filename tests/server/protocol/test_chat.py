import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.chat import ChatRequest
from server.protocol.errors import ApiError, from_validation

LIMITS = LimitsSection(max_messages=3, max_top_logprobs=5)
USER = {"role": "user", "content": "Hello"}


def request(**given: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": [USER]} | given))


def conversation(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return request(messages=list(messages)).conversation()


def refusal(**given: Any) -> ApiError:
    """What a request is refused with, by its types or by its meaning."""
    try:
        asked = request(**given)
        asked.check(LIMITS)
        asked.conversation()
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
        ({"messages": [USER | {"role": "function"}]}, "messages[0].role"),
        ({"messages": [USER, USER | {"content": 5}]}, "messages[1].content"),
        ({"messages": [USER | {"content": {"type": "text"}}]}, "messages[0].content"),
        ({"messages": [USER | {"tool_calls": "f()"}]}, "messages[0].tool_calls"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"top_logprobs": 6, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
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
        {"logprobs": True, "top_logprobs": 5},
        {"response_format": {"type": "text"}},
        {"tools": [], "functions": [], "tool_choice": "auto"},
        {"min_tokens": 0, "ignore_eos": False},
        {"chat_template_kwargs": {}},
        {"metadata": {"k": "v"}, "user": "u", "store": True, "service_tier": "auto"},
        {"messages": [USER | {"extra": 1}]},
        {name: None for name in ChatRequest.model_fields if name != "messages"},
    ],
)
def test_a_request_that_can_be_answered_is_let_pass(given: dict[str, Any]) -> None:
    asked = request(**given)
    asked.check(LIMITS)
    asked.conversation()


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
    ("given", "thinking"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_can_be_switched_in_two_ways(given: dict[str, Any], thinking: bool | None) -> None:
    assert request(**given).enable_thinking is thinking


def test_system_messages_are_joined_and_come_first() -> None:
    assert conversation(
        {"role": "system", "content": "One."},
        {"role": "developer", "content": "Two."},
        USER,
        {"role": "developer", "content": "Three."},
    ) == [
        {"role": "system", "content": "One.\n\nTwo."},
        USER,
        {"role": "system", "content": "Three."},
    ]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_are_joined(kind: str) -> None:
    parts = [{"type": kind, "text": "Hel"}, {"type": kind, "text": "lo"}]
    assert conversation({"role": "user", "content": parts}) == [USER]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio"},
        {"type": "text"},
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_place(part: dict[str, Any]) -> None:
    error = refusal(messages=[USER, USER | {"content": [{"type": "text", "text": "a"}, part]}])
    assert error.param == "messages[1].content[1]"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_thoughts_and_calls_are_handed_to_the_template(name: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, name: "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "content": "7", "tool_call_id": "1"}
    assert conversation(USER, said, result)[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
