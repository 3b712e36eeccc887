"""pydantic-ai against quire: chat completions, responses and messages."""

import asyncio
import os
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

RANDOM, PARROT = os.environ["QUIRE_RANDOM"], os.environ["QUIRE_PARROT"]
MODELS = {
    url: openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    for url in (RANDOM, PARROT)
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
APIS = ("chat", "responses", "messages")


class Forecast(BaseModel, extra="forbid"):
    """A forecast for some days."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


def model(api: str, url: str, name: str | None = None) -> Model:
    name = name or MODELS[url]
    if api == "messages":
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


@pytest.mark.parametrize("api", APIS)
def test_an_agent_streams(api: str) -> None:
    # Long enough for a slow reader too: the server joins the pieces that wait to be read.
    long = "bit by bit, " * 100 + "to the end"

    async def streamed() -> list[str]:
        async with Agent(model(api, PARROT)).run_stream(f"Repeat after me: {long}") as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert len(pieces) > 1
    assert "".join(pieces) == long


@pytest.mark.parametrize("api", APIS)
def test_an_agent_calls_its_tools_and_hears_their_answers(api: str) -> None:
    agent = Agent(model(api, PARROT))

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str, days: int) -> str:
        return f"sunny in {city} for {days} days"

    result = agent.run_sync(f"Repeat after me: {CALL}")
    assert result.output == "sunny in Paris for 2 days"
    parts = [part for message in result.all_messages() for part in message.parts]
    (call,) = [part for part in parts if isinstance(part, ToolCallPart)]
    assert call.args_as_dict() == {"city": "Paris", "days": 2}


@pytest.mark.parametrize(
    ("api", "way"),
    [
        ("chat", ToolOutput),
        ("chat", NativeOutput),
        ("responses", ToolOutput),
        ("responses", NativeOutput),
        ("messages", ToolOutput),
    ],
)
def test_an_output_is_an_object_of_its_class(api: str, way: type) -> None:
    agent = Agent(model(api, RANDOM), output_type=way(Forecast), retries=0)
    result = agent.run_sync("A forecast.", model_settings={"max_tokens": 2000})
    assert isinstance(result.output, Forecast)


def test_an_output_may_be_asked_for_in_words() -> None:
    agent = Agent(model("chat", PARROT), output_type=PromptedOutput(Forecast))
    result = agent.run_sync('Repeat after me: {"city": "Rome", "days": 3}')
    assert result.output == Forecast(city="Rome", days=3)


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_thoughts_are_told_from_the_answer(api: str) -> None:
    said = "<think>\nHow polite.\n</think>\n\nYou are welcome."
    result = Agent(model(api, PARROT)).run_sync(f"Repeat after me: {said}")
    parts = [part for message in result.all_messages() for part in message.parts]
    (thought,) = [part for part in parts if isinstance(part, ThinkingPart)]
    assert thought.content.strip() == "How polite."
    assert result.output.strip() == "You are welcome."
