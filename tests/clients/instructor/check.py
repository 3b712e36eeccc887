"""instructor against quire: an object of a class, by every way that it asks for one."""

import os
from collections.abc import Iterable
from typing import Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel, Field

RANDOM, PARROT = os.environ["QUIRE_RANDOM"], os.environ["QUIRE_PARROT"]
RANDOM_SDK, PARROT_SDK = (
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in (RANDOM, PARROT)
)
RANDOM_MODEL, PARROT_MODEL = (sdk.models.list().data[0].id for sdk in (RANDOM_SDK, PARROT_SDK))


class Forecast(BaseModel, extra="forbid"):
    """A forecast for some days."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


QUESTION = [{"role": "user", "content": "A forecast, please."}]
OBJECT = '{"city": "Rome", "days": 3}'


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_object_is_of_its_class_whatever_the_model_would_say(mode: str) -> None:
    client = instructor.from_openai(RANDOM_SDK, mode=instructor.Mode[mode])
    forecast = client.chat.completions.create(
        model=RANDOM_MODEL,
        messages=QUESTION,
        response_model=Forecast,
        max_retries=0,
        max_tokens=2000,
    )
    assert isinstance(forecast, Forecast)


def test_calls_that_the_model_chose_to_make_are_objects() -> None:
    client = instructor.from_openai(PARROT_SDK, mode=instructor.Mode.PARALLEL_TOOLS)
    calls = "\n".join(
        f'<tool_call>\n{{"name": "Forecast", "arguments": {arguments}}}\n</tool_call>'
        for arguments in (OBJECT, '{"city": "Paris", "days": 1}')
    )
    forecasts = client.chat.completions.create(
        model=PARROT_MODEL,
        messages=[{"role": "user", "content": f"Repeat after me: {calls}"}],
        response_model=Iterable[Forecast],
        max_retries=0,
    )
    assert [(forecast.city, forecast.days) for forecast in forecasts] == [("Rome", 3), ("Paris", 1)]


def test_objects_grow_while_they_are_streamed() -> None:
    client = instructor.from_openai(RANDOM_SDK, mode=instructor.Mode.TOOLS)
    partial = list(
        client.chat.completions.create_partial(
            model=RANDOM_MODEL, messages=QUESTION, response_model=Forecast, max_tokens=2000
        )
    )
    assert len(partial) > 1
    Forecast.model_validate(partial[-1].model_dump())


def test_responses_give_objects() -> None:
    client = instructor.from_openai(RANDOM_SDK, mode=instructor.Mode.RESPONSES_TOOLS)
    forecast = client.responses.create(
        model=RANDOM_MODEL, input="A forecast, please.", response_model=Forecast, max_retries=0
    )
    assert isinstance(forecast, Forecast)


def test_messages_give_objects() -> None:
    sdk = anthropic.Anthropic(base_url=RANDOM, api_key="none", max_retries=0)
    client = instructor.from_anthropic(sdk, mode=instructor.Mode.ANTHROPIC_TOOLS)
    forecast = client.messages.create(
        model=RANDOM_MODEL,
        messages=QUESTION,
        response_model=Forecast,
        max_retries=0,
        max_tokens=2000,
    )
    assert isinstance(forecast, Forecast)
