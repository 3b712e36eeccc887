import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError, from_validation
from server.text.conversation import Tool, Turn

MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
LIMITS = LimitsSection(max_messages=2)


def request(**given: Any) -> TokenizeRequest:
    return TokenizeRequest.model_validate_json(json.dumps(given))


def refusal(model: type[TokenizeRequest] | type[DetokenizeRequest], given: Any) -> ApiError:
    with pytest.raises((ApiError, ValidationError)) as caught:
        model.model_validate_json(json.dumps(given)).check(LIMITS)
    error = caught.value
    found = from_validation(error) if isinstance(error, ValidationError) else error
    assert isinstance(found, ApiError)
    assert found.status == 400
    return found


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, None),
        ({"prompt": None, "messages": None}, None),
        ({"prompt": "a", "content": "a"}, None),
        ({"prompt": "a", "messages": MESSAGES}, None),
        ({"prompt": ["a"]}, "prompt"),
        ({"content": [1]}, "content"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, *MESSAGES]}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"x": {}}}, "chat_template_kwargs.x"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "parse_special": "no"}, "parse_special"),
    ],
)
def test_what_has_no_tokens_is_refused_by_name(given: dict[str, Any], param: str | None) -> None:
    assert refusal(TokenizeRequest, given).param == param


@pytest.mark.parametrize("given", [{}, {"tokens": None}, {"tokens": "a"}, {"tokens": [[1]]}])
def test_what_has_no_text_is_refused_by_name(given: dict[str, Any]) -> None:
    assert refusal(DetokenizeRequest, given).param is not None


@pytest.mark.parametrize(
    ("given", "text"),
    [({"prompt": "a"}, "a"), ({"content": ""}, ""), ({"messages": MESSAGES}, None)],
)
def test_a_text_has_two_names(given: dict[str, Any], text: str | None) -> None:
    wire = request(**given)
    wire.check(LIMITS)
    assert wire.text == text


def test_messages_are_read_as_a_chats() -> None:
    wire = request(
        messages=MESSAGES, tools=TOOLS, tool_choice="none", reasoning_effort="none", model=None
    )
    wire.check(LIMITS)
    found = wire.conversation(LimitsSection(), Unsupported("refuse", "images.chat"))
    assert found.turns == (Turn("system", "Be brief."), Turn("user", "Hello"))
    assert found.tools == (Tool("look"),)
    assert found.offered_tools == ()
    assert found.thinking.enabled is False


def test_a_tool_that_cannot_be_offered_is_refused() -> None:
    wire = request(messages=MESSAGES, tools=TOOLS * 2)
    with pytest.raises(ApiError) as caught:
        wire.conversation(LimitsSection(), Unsupported("refuse", "images.chat"))
    assert caught.value.param == "tools[1].function.name"
