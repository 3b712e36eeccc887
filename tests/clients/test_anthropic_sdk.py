"""Anthropic's own package in this process, which refuses every answer that is not of its types."""

from typing import Any, Literal

import httpx2
import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError
from pydantic import BaseModel

MODEL = "recall"
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "What the weather is.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def sdk(http: httpx2.AsyncClient, **keys: Any) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url="http://localhost",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
        **(keys or {"api_key": "none"}),
    )


@pytest.fixture
def said(parrot: httpx2.AsyncClient) -> AsyncAnthropic:
    return sdk(parrot)


@pytest.fixture
def held(random: httpx2.AsyncClient) -> AsyncAnthropic:
    return sdk(random)


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Repeat after me: {text}"}]


def ask(messages: Any, **more: Any) -> Any:
    return {"model": MODEL, "max_tokens": 2000, "messages": messages} | more


async def both(client: AsyncAnthropic, asked: Any) -> list[Any]:
    """The answer to a request, whole and put together from its events."""
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    return [whole, streamed]


async def test_both_kinds_of_key_are_accepted(parrot: httpx2.AsyncClient) -> None:
    for keys in ({"api_key": "a"}, {"auth_token": "b"}):
        answer: Any = await sdk(parrot, **keys).messages.create(**ask(say("hi")))
        assert answer.content[0].text == "hi"


async def test_a_tool_is_used_and_its_result_heard(said: AsyncAnthropic) -> None:
    for answer in await both(said, ask(say(f"Let me look.\n{CALL}"), tools=TOOLS)):
        assert answer.stop_reason == "tool_use"
        text, use = answer.content
        assert text.text.strip() == "Let me look."
        assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
        content = [block.to_dict() for block in answer.content]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        messages = [
            *say(CALL),
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
        last: Any = await said.messages.create(**ask(messages, tools=TOOLS))
        assert last.content[-1].text == "sunny"


async def test_thoughts_are_blocks_of_their_own_and_come_back_in(said: AsyncAnthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = say("<think>\nHm.\n</think>\n\nYes.")
    for answer in await both(said, ask(messages, thinking=thinking)):
        thought, text = answer.content
        assert thought.thinking.strip() == "Hm."
        assert text.text.strip() == "Yes."
        content = [block.to_dict() for block in answer.content]
        again = [*messages, {"role": "assistant", "content": content}, *say("fine")]
        last: Any = await said.messages.create(**ask(again, thinking=thinking))
        assert last.content[-1].text == "fine"


async def test_tokens_are_counted_as_they_are_charged(said: AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "messages": say("hi"), "system": "Be brief.", "tools": TOOLS}
    counted = await said.messages.count_tokens(**asked)
    usage = (await said.messages.create(**asked, max_tokens=10)).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    nights: int


async def test_an_answer_is_parsed_as_the_type_that_was_asked_for(held: AsyncAnthropic) -> None:
    asked = ask(say("nothing"), output_format=Place, thinking={"type": "disabled"})
    answer = await held.messages.parse(**asked, extra_body={"seed": 3})
    assert isinstance(answer.parsed_output, Place)


async def test_errors_have_the_classes_that_callers_catch(said: AsyncAnthropic) -> None:
    with pytest.raises(NotFoundError) as unknown:
        await said.messages.create(**ask(say("hi"), model="claude-none"))
    body: Any = unknown.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    with pytest.raises(BadRequestError) as long:
        await said.messages.create(**ask(say("long " * 20_000)))
    body = long.value.body
    assert body["error"]["type"] == "invalid_request_error"
