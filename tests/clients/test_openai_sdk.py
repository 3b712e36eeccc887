"""OpenAI's own package in this process, which refuses every answer that is not of its types."""

import json
from pathlib import Path
from typing import Any, Literal

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionToolUnionParam
from pydantic import BaseModel, Field

from engine.models.checkpoint import read_checkpoint
from server.text.tokenizer import Tokenizer
from tests.reference import load_reference
from tests.server.harness import ids_of

MODEL = "recall"
TOOLS: list[ChatCompletionToolUnionParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What the weather is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_forecast")
]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[typeddict-item]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Forecast(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


def sdk(http: httpx2.AsyncClient, *, strict: bool = True) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=http,
        max_retries=0,
        _strict_response_validation=strict,
    )


@pytest.fixture
def said(parrot: httpx2.AsyncClient) -> AsyncOpenAI:
    return sdk(parrot)


@pytest.fixture
def held(random: httpx2.AsyncClient) -> AsyncOpenAI:
    return sdk(random)


def say(text: str) -> Any:
    return [{"role": "user", "content": f"Repeat after me: {text}"}]


# --- models ----------------------------------------------------------------------------------


async def test_models_are_listed_and_found_by_every_name(said: AsyncOpenAI) -> None:
    (model,) = [model async for model in said.models.list()]
    assert model.id == MODEL
    for name in (MODEL, "org/alias", "alias"):
        assert (await said.models.retrieve(name)).id == MODEL
    with pytest.raises(NotFoundError) as error:
        await said.models.retrieve("gpt-none")
    assert error.value.code == "model_not_found"


# --- chat ------------------------------------------------------------------------------------


async def test_a_chat_with_a_tool_is_the_same_streamed_and_whole(said: AsyncOpenAI) -> None:
    messages = say(f"<think>\nHm.\n</think>\n\nGrüße 🙂\n{CALL}")
    asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS}
    whole = await said.chat.completions.create(**asked)
    async with said.chat.completions.stream(**asked) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        message: Any = answer.choices[0].message
        assert (message.content.strip(), message.reasoning_content.strip()) == ("Grüße 🙂", "Hm.")
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        last = await said.chat.completions.create(
            model=MODEL, messages=[*say(CALL), message.to_dict(), result], tools=TOOLS
        )
        assert last.choices[0].message.content == "sunny"


async def test_answers_are_parsed_into_objects_streamed_and_whole(held: AsyncOpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": say("nothing"),
        "response_format": Forecast,
        "max_tokens": 2000,
    }
    whole = await held.chat.completions.parse(**asked)
    async with held.chat.completions.stream(**asked) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        assert isinstance(answer.choices[0].message.parsed, Forecast)
    form: Any = {"model": MODEL, "input": "x", "text_format": Forecast, "max_output_tokens": 2000}
    parsed = await held.responses.parse(**form)
    async with held.responses.stream(**form) as responses:
        final = await responses.get_final_response()
    for response in (parsed, final):
        assert isinstance(response.output_parsed, Forecast)


async def test_errors_have_the_classes_that_callers_catch(said: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as unknown:
        await said.chat.completions.create(model="gpt-none", messages=say("x"))
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(BadRequestError, match=r"maximum context length is \d+ tokens") as long:
        await said.chat.completions.create(model=MODEL, messages=say("long " * 20_000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as wrong:
        await said.chat.completions.create(model=MODEL, messages=say("x"), temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(BadRequestError, match="as input") as lost:
        await said.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert lost.value.code == "previous_response_not_found"


# --- completions and embeddings --------------------------------------------------------------


async def test_prompts_are_scored_and_continued(random: httpx2.AsyncClient) -> None:
    # The first token has no log-probability: a null that the types of the package do not have.
    # Neither have they a chunk that is not the last one.
    asked: Any = {"model": MODEL, "prompt": ["Once", "Twice"], "max_tokens": 3, "temperature": 0}
    asked |= {"logprobs": 1, "echo": True}
    client = sdk(random, strict=False)
    whole = await client.completions.create(**asked)
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert choice.text == "".join(part.text for part in parts)
        lists: Any = choice.logprobs
        assert len(lists.tokens) == len(lists.token_logprobs) > 3


@pytest.fixture
def embeds(embedder: httpx2.AsyncClient) -> AsyncOpenAI:
    return sdk(embedder)


async def test_texts_and_ids_are_embedded_as_mlx_lm_would(
    embeds: AsyncOpenAI, embedder_folder: Path
) -> None:
    model = load_reference(read_checkpoint(embedder_folder))
    texts = ["Hello", "Once upon a time", "x"]
    tokenizer = Tokenizer(embedder_folder)
    ids = [ids_of(tokenizer, text + "<|endoftext|>") for text in texts]
    states = [model.model(mx.array([tokens]))[0, -1].astype(mx.float32) for tokens in ids]
    for given in (texts, ids):
        found = await embeds.embeddings.create(model=MODEL, input=given, encoding_format="float")
        assert [one.index for one in found.data] == [0, 1, 2]
        for one, state in zip(found.data, map(np.array, states), strict=True):
            wanted = state / np.linalg.norm(state)
            assert np.abs(np.array(one.embedding) - wanted).max() < 1e-5
        assert found.usage.total_tokens == found.usage.prompt_tokens == sum(map(len, ids))


async def test_the_sdk_reads_its_own_default_encoding(embedder: httpx2.AsyncClient) -> None:
    """It asks for base64 and makes numbers of it, which its strict mode does not allow for."""
    loose = AsyncOpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=embedder, max_retries=0
    )
    texts = [f"Text {number}" for number in range(16)]
    packed = await loose.embeddings.create(model=MODEL, input=texts)
    plain = await loose.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    alone = [await loose.embeddings.create(model=MODEL, input=text) for text in texts]
    for one, other, single in zip(packed.data, plain.data, alone, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert one.embedding == pytest.approx(single.data[0].embedding, abs=1e-5)
    short = await loose.embeddings.create(model=MODEL, input=texts[0], dimensions=8)
    head = np.array(alone[0].data[0].embedding[:8])
    assert short.data[0].embedding == pytest.approx(head / np.linalg.norm(head), abs=1e-5)


# --- responses -------------------------------------------------------------------------------


async def test_responses_call_functions_and_hear_their_answers(said: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "input": say(CALL), "tools": FLAT_TOOLS}
    whole = await said.responses.create(**asked)
    async with said.responses.stream(**asked) as stream:
        streamed = await stream.get_final_response()
    answers: list[Any] = [whole, streamed]
    for response in answers:
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": "Paris"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        last = await said.responses.create(
            model=MODEL, input=[result], tools=FLAT_TOOLS, previous_response_id=response.id
        )
        assert last.output_text == "sunny"


async def test_stored_responses_are_retrieved_listed_and_deleted(said: AsyncOpenAI) -> None:
    items: Any = [{"role": "developer", "content": "Be brief."}, *say("one")]
    first = await said.responses.create(model=MODEL, input=items)
    again: Any = [
        *say(CALL),
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "one"},
        *say("two"),
    ]
    second = await said.responses.create(model=MODEL, input=again, previous_response_id=first.id)
    assert await said.responses.retrieve(second.id) == second
    listed = [
        item.type async for item in said.responses.input_items.list(second.id, order="asc", limit=1)
    ]
    assert listed == ["message", "function_call", "function_call_output", "message"]
    await said.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        await said.responses.retrieve(first.id)
    third = await said.responses.create(
        model=MODEL, input=say("three"), previous_response_id=second.id
    )
    assert third.output_text == "three", "what a response was made of stays with it"
