"""langchain-openai and langchain-anthropic against quire."""

import os
from typing import Any, Literal

import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

RANDOM, PARROT = os.environ["QUIRE_RANDOM"], os.environ["QUIRE_PARROT"]
MODELS = {
    url: openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    for url in (RANDOM, PARROT)
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)


class Forecast(BaseModel, extra="forbid"):
    """A forecast for some days."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


@tool(args_schema=Forecast)  # type: ignore[untyped-decorator]
def get_weather(city: str, days: int) -> str:
    """What the weather will be."""
    return f"sunny in {city} for {days} days"


def chat(url: str, **settings: Any) -> ChatOpenAI:
    settings = {"max_retries": 0, "max_tokens": 2000} | settings
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODELS[url], **settings)


def claude(url: str, **settings: Any) -> ChatAnthropic:
    return ChatAnthropic(
        base_url=url, api_key="none", model=MODELS[url], max_tokens=2000, **settings
    )


# --- chat completions ------------------------------------------------------------------------


def test_chat_streams_the_same_answer() -> None:
    long = "bit by bit, " * 30 + "to the end"
    chunks = list(chat(PARROT, stream_usage=True).stream(f"Repeat after me: {long}"))
    assert len(chunks) > 4, "more than who speaks, a text, its end and its usage"
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == long
    assert whole.usage_metadata["output_tokens"] > 3


def test_a_call_that_the_model_chose_to_make_comes_back_and_its_answer_goes_in() -> None:
    model = chat(PARROT).bind_tools([get_weather])
    question = HumanMessage(f"Repeat after me: Let me look.\n{CALL}")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert answer.content.strip() == "Let me look."
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "days": 2})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([question, answer, result]).content == "sunny in Paris for 2 days"


@pytest.mark.parametrize("choice", ["any", "get_weather"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_is_asked_for_satisfies_its_schema(choice: str, streamed: bool) -> None:
    model = chat(RANDOM).bind_tools([get_weather], tool_choice=choice, strict=True)
    chunks = list(model.stream("Weather?")) if streamed else [model.invoke("Weather?")]
    answer = sum(chunks[1:], chunks[0])
    assert answer.tool_calls
    for call in answer.tool_calls:
        Forecast.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_its_class(method: str) -> None:
    model = chat(RANDOM).with_structured_output(Forecast, method=method, strict=True)
    assert isinstance(model.invoke("A forecast as JSON, please."), Forecast)


def test_json_mode_gives_json() -> None:
    model = chat(PARROT).with_structured_output(Forecast, method="json_mode")
    assert model.invoke('Repeat after me: {"city": "Rome", "days": 3}') == Forecast(
        city="Rome", days=3
    )


# --- responses -------------------------------------------------------------------------------


def test_responses_answer_and_stream() -> None:
    model = chat(PARROT, use_responses_api=True, output_version="responses/v1")
    answer = model.invoke("Repeat after me: as items")
    assert answer.text == "as items"
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream("Repeat after me: as events"))
    assert sum(chunks[1:], chunks[0]).text == "as events"


def test_responses_call_tools_and_take_their_answers() -> None:
    model = chat(PARROT, use_responses_api=True).bind_tools([get_weather])
    question = HumanMessage(f"Repeat after me: {CALL}")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert call["args"] == {"city": "Paris", "days": 2}
    assert model.invoke([question, answer, get_weather.invoke(call)]).text == (
        "sunny in Paris for 2 days"
    )


# --- the others ------------------------------------------------------------------------------


def test_completions_continue_a_prompt() -> None:
    settings: dict[str, Any] = {"base_url": f"{RANDOM}/v1", "api_key": "none", "max_tokens": 5}
    model = OpenAI(model=MODELS[RANDOM], temperature=0, **settings)
    assert model.invoke("Once upon") == "".join(model.stream("Once upon"))


def test_messages_answer_and_stream() -> None:
    answer = claude(PARROT).invoke("Repeat after me: bonjour")
    assert answer.content == "bonjour"
    assert answer.usage_metadata["input_tokens"] > 5
    chunks = list(claude(PARROT).stream("Repeat after me: bonsoir"))
    assert sum(chunks[1:], chunks[0]).text == "bonsoir"


def test_messages_call_tools() -> None:
    model = claude(PARROT).bind_tools([get_weather])
    question = HumanMessage(f"Repeat after me: {CALL}")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert call["args"] == {"city": "Paris", "days": 2}
    last = model.invoke([question, answer, get_weather.invoke(call)])
    assert last.content == "sunny in Paris for 2 days"
    tool = {"name": "forecast", "input_schema": Forecast.model_json_schema()}
    forced = claude(RANDOM).bind_tools([tool], tool_choice="forecast").invoke("Weather?")
    Forecast.model_validate(forced.tool_calls[0]["args"])
