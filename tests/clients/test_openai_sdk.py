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
NAMED: Any = {"type": "function", "function": {"name": "get_forecast"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


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


async def test_chat_answers_alike_streamed_and_whole(said: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": say("<think>\nHm.\n</think>\n\nGrüße 🙂")}
    whole = await said.chat.completions.create(**asked)
    chunks = [
        chunk
        async for chunk in await said.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    message = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert message.content == "".join(delta.content or "" for delta in deltas)
    assert message.content is not None
    assert message.content.strip() == "Grüße 🙂"
    thoughts = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert (message.model_extra or {})["reasoning_content"] == "".join(thoughts)
    assert "Hm." in "".join(thoughts)
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details


async def test_several_answers_have_log_probabilities_of_their_own(held: AsyncOpenAI) -> None:
    answer = await held.chat.completions.create(
        model=MODEL, messages=say("x"), n=2, max_tokens=3, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 3
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


async def test_a_call_that_the_model_chose_to_make_comes_back(said: AsyncOpenAI) -> None:
    messages = say(f"Let me look.\n{CALL}\n{CALL}")
    answer = await said.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    async with said.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        streamed = await stream.get_final_completion()
    for choice in (answer.choices[0], streamed.choices[0]):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is not None
        assert choice.message.content.strip() == "Let me look."
        calls: Any = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather"] * 2
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
        assert len({call.id for call in calls}) == 2


async def test_what_a_tool_answers_is_heard(said: AsyncOpenAI) -> None:
    messages = say(CALL)
    answer = await said.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message: Any = answer.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    last = await said.chat.completions.create(
        model=MODEL, messages=[*messages, message.to_dict(), result], tools=TOOLS
    )
    assert last.choices[0].message.content == "sunny"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_forecast"}),
        (NAMED, {"get_forecast"}),
        (ALLOWED, {"get_forecast"}),
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_call_that_is_asked_for_satisfies_its_schema(
    held: AsyncOpenAI, choice: Any, names: set[str]
) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": say("nothing"),
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 2000,
        "parallel_tool_calls": False,
    }
    whole = await held.chat.completions.create(**asked)
    async with held.chat.completions.stream(**asked) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        calls: Any = answer.choices[0].message.tool_calls
        (call,) = calls
        assert call.function.name in names
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


async def test_a_chat_is_parsed_into_an_object_streamed_and_whole(held: AsyncOpenAI) -> None:
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


# --- completions and embeddings --------------------------------------------------------------


PROMPTS = (("Once", 1), (["Once", "Twice"], 2), ([79, 110], 1), ([[79, 110], [84]], 2))


@pytest.mark.parametrize(("prompt", "count"), PROMPTS)
@pytest.mark.parametrize("how", [{"echo": True, "n": 2}, {"logprobs": 2}], ids=["echo", "logprobs"])
async def test_completions_continue_every_kind_of_prompt(
    random: httpx2.AsyncClient, prompt: Any, count: int, how: dict[str, Any]
) -> None:
    asked: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0} | how
    whole = await sdk(random).completions.create(**asked)
    # The types of the package have no chunk that is not the last one.
    stream = await sdk(random, strict=False).completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in whole.choices] == list(range(count * how.get("n", 1)))
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * len(whole.choices)
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert choice.text == "".join(part.text for part in parts)
        assert choice.finish_reason == parts[-1].finish_reason == "length"
        assert (choice.logprobs is not None) == ("logprobs" in how)


@pytest.mark.parametrize(("prompt", "count"), PROMPTS)
@pytest.mark.parametrize("length", [0, 1])
async def test_a_prompt_is_scored_token_by_token(
    random: httpx2.AsyncClient, prompt: Any, count: int, length: int
) -> None:
    # The first token has no log-probability: a null that the types of the package do not have.
    answer = await sdk(random, strict=False).completions.create(
        model=MODEL, prompt=prompt, max_tokens=length, temperature=0, logprobs=1, echo=True
    )
    assert len(answer.choices) == count
    for choice in answer.choices:
        lists: Any = choice.logprobs
        first, *others = zip(lists.token_logprobs, lists.top_logprobs, strict=True)
        assert first == (None, None)
        assert all(value < 0 and value <= max(top.values()) for value, top in others)
        assert len(lists.tokens) == len(lists.text_offset) == len(others) + 1
        assert answer.usage is not None
        assert answer.usage.completion_tokens == count * length


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


async def test_responses_answer_and_remember(said: AsyncOpenAI) -> None:
    first = await said.responses.create(model=MODEL, input="Repeat after me: one")
    assert (first.status, first.output_text) == ("completed", "one")
    second = await said.responses.create(
        model=MODEL, input=say("two"), previous_response_id=first.id
    )
    assert second.output_text == "two"
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


async def test_responses_stream_their_events_in_order(said: AsyncOpenAI) -> None:
    async with said.responses.stream(
        model=MODEL, input=say("<think>\nHm.\n</think>\n\nbit by bit")
    ) as stream:
        events = [event async for event in stream]
        last = await stream.get_final_response()
    assert last.output_text.strip() == "bit by bit"
    assert [item.type for item in last.output] == ["reasoning", "message"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


async def test_responses_are_held_to_tools_and_schemas(held: AsyncOpenAI) -> None:
    forced = await held.responses.create(
        model=MODEL, input="x", tools=FLAT_TOOLS, tool_choice="required", max_output_tokens=2000
    )
    calls = [item for item in forced.output if item.type == "function_call"]
    assert calls
    assert all(json.loads(call.arguments)["city"] in ("Paris", "Rome") for call in calls)
    parsed = await held.responses.parse(
        model=MODEL, input="x", text_format=Forecast, max_output_tokens=2000
    )
    assert isinstance(parsed.output_parsed, Forecast)
