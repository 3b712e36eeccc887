import json
from typing import Any

import pytest
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError
from server.text.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice, Turn

LIMITS = LimitsSection(max_messages=3)
HELLO = [{"role": "user", "content": "Hello"}]
UNSUPPORTED = Unsupported("refuse", "images.messages")
SCHEMA: dict[str, Any] = {"type": "object"}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def request(**given: Any) -> MessagesRequest:
    body = {"max_tokens": 5, "messages": HELLO} | given
    return MessagesRequest.model_validate_json(json.dumps(body))


def conversation(**given: Any) -> Conversation:
    return request(**given).conversation(LIMITS, UNSUPPORTED)


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        conversation(**given)
    assert caught.value.status == 400
    return caught.value


def test_the_least_that_can_be_asked() -> None:
    asked = request()
    assert (asked.max_tokens, asked.stop_strings()) == (5, ())
    assert conversation() == Conversation((Turn("user", "Hello"),), tool_choice=ToolChoice("none"))


def test_the_system_prompt_comes_first_and_may_come_again() -> None:
    messages = [*HELLO, {"role": "system", "content": "Now in French."}, *HELLO]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert conversation(system=system, messages=messages).turns == (
        Turn("system", "Be brief."),
        Turn("system", "Be kind."),
        Turn("user", "Hello"),
        Turn("system", "Now in French."),
        Turn("user", "Hello"),
    )
    assert conversation(system="Be brief.").turns[0] == Turn("system", "Be brief.")


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
@pytest.mark.parametrize("missing", ["max_tokens", "messages"])
def test_what_must_be_there_is_named(given: dict[str, Any], missing: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": HELLO}
    del body[missing]
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(body | {k: v for k, v in given.items() if k == missing})
    assert caught.value.errors()[0]["loc"] == (missing,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 2**31),
        ("messages", []),
        ("messages", "Hello"),
        ("stop_sequences", "a"),
        ("thinking", {"type": "perhaps"}),
        ("thinking", {"type": "enabled", "budget_tokens": -1}),
        ("tool_choice", "auto"),
        ("output_config", {"effort": "huge"}),
        ("output_config", {"format": {"type": "text"}}),
        ("chat_template_kwargs", {"other": [1]}),
        ("temperature", 2.5),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        request(**{name: value})
    assert caught.value.errors()[0]["loc"][0] == name


def test_the_assistants_last_message_is_the_beginning_of_the_answer() -> None:
    assert conversation(messages=[*HELLO, {"role": "assistant", "content": "Well"}]).continues
    assert not conversation().continues


def test_too_many_messages_and_tools_are_refused() -> None:
    assert refusal(messages=HELLO * 4).param == "messages"
    assert refusal(tools=[{"name": f"f{n}"} for n in range(257)]).param == "tools"


def test_tools_and_their_choice_are_read() -> None:
    found = conversation(
        tools=[{"name": "look", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert found.tools == (Tool("look", parameters=SCHEMA),)
    assert found.tool_choice == ToolChoice("required")
    assert found.parallel_tool_calls is False
    assert conversation(tools=[{"name": "look"}]).tool_choice == ToolChoice("auto")


@pytest.mark.parametrize(
    ("given", "thinks"),
    [
        ({}, Thinking()),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking()),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"thinking": {"type": "between_tools"}}, Thinking(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Thinking(True, 1024)),
        ({"thinking": {"type": "enabled"}}, Thinking(True)),
        ({"output_config": {"effort": "low"}}, Thinking(True, 2048)),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, Thinking(True)),
        (
            {
                "output_config": {"effort": "low"},
                "thinking": {"type": "enabled", "budget_tokens": 9},
            },
            Thinking(True, 9),
        ),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, Thinking(False)),
        ({"enable_thinking": False}, Thinking(False)),
        ({"enable_thinking": False, "output_config": {"effort": "medium"}}, Thinking(False, 8192)),
        ({"chat_template_kwargs": {"enable_thinking": True}}, Thinking(True)),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            Thinking(False),
        ),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, Thinking(True)),
    ],
)
def test_how_much_is_thought_is_said_in_many_ways(given: dict[str, Any], thinks: Thinking) -> None:
    found = conversation(**given).thinking
    assert (found.enabled, found.budget) == (thinks.enabled, thinks.budget)


def test_an_answer_may_have_a_schema() -> None:
    asked = OutputFormat("json_schema", SCHEMA, "output_config.format.schema")
    assert conversation(output_config=FORMAT).output == asked
    assert conversation(output_config={"effort": "low"}).output is None
    regex = {"structured_outputs": {"regex": "a+"}}
    assert conversation(**regex).output == OutputFormat("regex", "a+", "structured_outputs.regex")
    assert refusal(**regex, output_config=FORMAT).param == "structured_outputs.regex"


def test_stop_sequences_have_their_own_name_in_errors() -> None:
    asked = request(stop_sequences=["a", "b"] * 7)
    asked.check(LimitsSection())
    assert asked.stop_strings() == ("a", "b") * 7
    for wrong in ([""], ["a"] * 513):
        with pytest.raises(ApiError) as caught:
            request(stop_sequences=wrong).check(LimitsSection())
        assert caught.value.param == "stop_sequences"


def test_a_count_is_of_the_same_conversation_and_needs_no_length() -> None:
    body = {"messages": HELLO, "system": "Be brief.", "tools": [{"name": "look"}]}
    counted = CountTokensRequest.model_validate(body).conversation(LIMITS, UNSUPPORTED)
    assert counted == conversation(**body)
    CountTokensRequest.model_validate(body | {"max_tokens": "many", "n": 5})
