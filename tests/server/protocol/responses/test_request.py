import json
from typing import Any

import pytest

from engine.types import SamplingParams
from server.config import LimitsSection
from server.protocol.responses.items import MessageItem
from server.protocol.responses.request import ResponsesRequest
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice, Turn

LIMITS = LimitsSection()
LOOK = {"type": "function", "name": "look"}
UNSUPPORTED = Unsupported("refuse", "images.responses", "responses")
SCHEMA = {"type": "object"}
PARAMS = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.25)


def wire(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate_json(json.dumps({"input": "Hello"} | fields))


def conversation(
    *, history: Any = (), limits: LimitsSection = LIMITS, **fields: Any
) -> Conversation:
    asked = wire(**fields)
    asked.check(limits)
    return asked.conversation(
        history, asked.items(lambda _: None, UNSUPPORTED), limits, UNSUPPORTED
    )


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        conversation(**fields)
    assert caught.value.status == 400
    return caught.value


def test_instructions_come_before_all_that_was_said() -> None:
    history = (MessageItem(role="user", content="before"),)
    found = conversation(instructions="Be brief.", history=history)
    assert found.turns == (
        Turn("system", "Be brief."),
        Turn("user", "before"),
        Turn("user", "Hello"),
    )
    assert conversation(instructions="").turns == (Turn("user", "Hello"),)


def test_tools_and_their_choice_are_taken_over() -> None:
    found = conversation(
        tools=[{"type": "web_search"}, LOOK], tool_choice="required", parallel_tool_calls=False
    )
    assert found.tools == (Tool("look"),)
    assert found.tool_choice == ToolChoice("required")
    assert not found.parallel_tool_calls
    assert conversation(tools=[{"type": "web_search"}]) == conversation()


def test_nothing_new_may_be_said_to_a_stored_conversation() -> None:
    history = (MessageItem(role="user", content="before"),)
    nothing: tuple[Any, ...] = (None, [])
    for given in nothing:
        found = conversation(input=given, previous_response_id="resp_1", history=history)
        assert found.turns == (Turn("user", "before"),)
        assert refusal(input=given).param == "input"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning": {"summary": "auto", "effort": None}}, Thinking()),
        ({"reasoning": {"effort": "none"}}, Thinking(enabled=False)),
        ({"reasoning": {"effort": "low"}}, Thinking(True, 2048)),
        ({"reasoning": {"summary": "auto"}, "reasoning_effort": "none"}, Thinking(enabled=False)),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "none"}, Thinking(enabled=True)),
        ({"reasoning": {"effort": "low"}, "thinking_budget": 7}, Thinking(True, 7)),
        ({"enable_thinking": False}, Thinking(enabled=False)),
    ],
)
def test_effort_says_how_much_to_think(fields: Any, thinking: Thinking) -> None:
    found = conversation(**fields).thinking
    assert (found.enabled, found.budget) == (thinking.enabled, thinking.budget)


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"text": {}}, None),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        (
            {"text": {"format": {"type": "json_object"}}},
            OutputFormat("json_object", None, "text.format"),
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            OutputFormat("json_schema", SCHEMA, "text.format.schema", strict=False),
        ),
        (
            {"text": {"format": {"type": "json_schema", "strict": True, "schema": SCHEMA}}},
            OutputFormat("json_schema", SCHEMA, "text.format.schema"),
        ),
        ({"text": {}, "guided_regex": "a"}, OutputFormat("regex", "a", "guided_regex")),
    ],
)
def test_the_format_says_what_the_answer_must_be(fields: Any, output: OutputFormat | None) -> None:
    assert conversation(**fields).output == output


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        (
            {"limits": LimitsSection(max_messages=1), "history": (MessageItem(role="user"),)},
            "input",
        ),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(fields: Any, param: str) -> None:
    assert refusal(**fields).param == param


def test_what_says_nothing_is_let_pass() -> None:
    nothing: dict[str, Any] = {
        "n": 1,
        "truncation": "auto",
        "context_management": [{"type": "compaction"}],
        "background": False,
        "include": ["x.y"],
    }
    reasoning = {"context": "auto", "mode": "standard", "generate_summary": "auto"}
    assert conversation(**nothing, reasoning=reasoning) == conversation()


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 2}, 2),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_log_probabilities_are_asked_for_in_two_ways(fields: Any, logprobs: int | None) -> None:
    assert wire(**fields).logprobs == logprobs


def test_thoughts_are_packed_where_they_are_asked_for() -> None:
    assert wire(include=["reasoning.encrypted_content"]).packs_reasoning
    assert not wire().packs_reasoning


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, (None, "max_tokens")),
        ({"max_tokens": 3}, (3, "max_tokens")),
        ({"max_tokens": 3, "max_output_tokens": 5}, (5, "max_output_tokens")),
    ],
)
def test_the_length_has_two_names(fields: Any, length: Any) -> None:
    assert wire(**fields).asked_length == length


def repeated(**fields: Any) -> Any:
    return wire(**fields).repeated(conversation(**fields), PARAMS)


def test_a_response_repeats_what_is_in_force() -> None:
    found = repeated()
    assert (found["temperature"], found["top_p"]) == (0.5, 0.25)
    assert (found["tool_choice"], found["tools"], found["store"]) == ("auto", [], True)
    assert found["text"] == {"format": {"type": "text"}}
    assert found["reasoning"] == {"effort": None, "summary": None}
    assert found["instructions"] is found["max_output_tokens"] is None
    assert (found["metadata"], found["truncation"]) == ({}, "disabled")


def test_a_response_repeats_what_was_asked() -> None:
    named = {"type": "function", "name": "look"}
    schema = {"type": "json_schema", "schema": SCHEMA}
    found = repeated(
        instructions="Be brief.",
        metadata={"a": "b"},
        tools=[LOOK, {"type": "web_search"}],
        tool_choice=named,
        text={"format": schema, "verbosity": "low"},
        reasoning={"effort": "low"},
        store=False,
        previous_response_id="resp_1",
        max_tokens=7,
        top_logprobs=1,
    )
    assert [tool["name"] for tool in found["tools"]] == ["look"]
    assert found["tool_choice"] == named
    assert found["text"] == {
        "format": schema | {"name": "answer", "strict": False},
        "verbosity": "low",
    }
    assert found["reasoning"]["effort"] == "low"
    assert (found["store"], found["previous_response_id"]) == (False, "resp_1")
    assert (found["max_output_tokens"], found["top_logprobs"]) == (7, 1)
    assert (found["instructions"], found["metadata"]) == ("Be brief.", {"a": "b"})
    assert repeated(tools=[LOOK], tool_choice="required")["tool_choice"] == "required"
