"""How much is thought, by all the fields that say so. tests/api has what else a chat may have."""

import json
from typing import Any

import pytest

from server.config import LimitsSection
from server.protocol.chat.request import ChatRequest
from server.protocol.unsupported import Unsupported
from server.text.conversation import Thinking


def thinking(**given: Any) -> Thinking:
    body = {"messages": [{"role": "user", "content": "Hello"}]} | given
    wire = ChatRequest.model_validate_json(json.dumps(body))
    return wire.conversation(LimitsSection(), Unsupported("refuse", "images.chat")).thinking


@pytest.mark.parametrize(
    ("given", "enabled", "budget"),
    [
        ({}, None, None),
        ({"thinking_token_budget": 0}, None, 0),
        ({"thinking_budget": 5}, None, 5),
        ({"thinking_token_budget": 7, "thinking_budget": 5}, None, 7),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, 512),
        ({"reasoning_effort": "low"}, True, 2048),
        ({"reasoning_effort": "medium"}, True, 8192),
        ({"reasoning_effort": "high"}, True, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 5}, True, 5),
        ({"reasoning": {"effort": "low", "max_tokens": 5.0}}, True, 5),
        ({"reasoning": {"max_tokens": 5}, "thinking_budget": 7}, None, 7),
        ({"reasoning": {"max_tokens": None, "effort": None}}, None, None),
        ({"reasoning_effort": "none", "enable_thinking": True}, True, None),
    ],
)  # fmt: skip
def test_an_effort_is_a_budget_unless_one_is_named(
    given: dict[str, Any], enabled: bool | None, budget: int | None
) -> None:
    found = thinking(**given)
    assert (found.enabled, found.budget) == (enabled, budget)
