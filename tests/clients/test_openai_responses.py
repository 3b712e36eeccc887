"""OpenAI's own package and /v1/responses, beyond what test_openai_sdk.py asks of every API."""

import json
from typing import Any

import httpx2
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from tests.clients.test_openai_sdk import CALL, FLAT_TOOLS, MODEL, Forecast, say, sdk


@pytest.fixture
def said(parrot: httpx2.AsyncClient) -> AsyncOpenAI:
    return sdk(parrot)


@pytest.fixture
def held(random: httpx2.AsyncClient) -> AsyncOpenAI:
    return sdk(random)


def saying(response: Any) -> list[Any]:
    """What was thought, said and called, without ids."""
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, json.loads(item.arguments), item.status))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


async def streamed(client: AsyncOpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """All events, and the final response."""
    async with client.responses.stream(model=MODEL, **asked) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_response()


async def test_a_final_response_is_the_whole_one(said: AsyncOpenAI) -> None:
    asked: Any = {
        "input": say(f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"),
        "tools": FLAT_TOOLS,
        "instructions": "Be brief.",
        "metadata": {"run": "1"},
        "include": ["reasoning.encrypted_content"],
    }
    whole = await said.responses.create(model=MODEL, **asked)
    events, final = await streamed(said, **asked)
    called = ("function_call", "get_weather", {"city": "Paris"}, "completed")
    kinds = ["reasoning", "message", called, called]
    assert [each if each[0] == "function_call" else each[0] for each in saying(whole)] == kinds
    assert saying(final) == saying(whole)
    assert (final.instructions, final.metadata) == ("Be brief.", {"run": "1"})
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas).replace("}{", "},{").join("[]")) == [{"city": "Paris"}] * 2


async def test_a_tools_answer_goes_on_from_a_stored_response(said: AsyncOpenAI) -> None:
    for as_stream in (False, True):
        asked: Any = {"input": say(CALL), "tools": FLAT_TOOLS}
        if as_stream:
            _, first = await streamed(said, **asked)
        else:
            first = await said.responses.create(model=MODEL, **asked)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_text", "text": "sunny"}],
        }
        second = await said.responses.create(
            model=MODEL, input=[result], tools=FLAT_TOOLS, previous_response_id=first.id
        )
        assert second.output_text == "sunny"
        assert second.previous_response_id == first.id


async def test_a_response_is_parsed_into_an_object_streamed_and_whole(held: AsyncOpenAI) -> None:
    asked: Any = {"input": "x", "text_format": Forecast, "max_output_tokens": 2000}
    whole = await held.responses.parse(model=MODEL, **asked)
    _, final = await streamed(held, **asked)
    for response in (whole, final):
        assert isinstance(response.output_parsed, Forecast)


async def test_log_probabilities_come_with_the_text(said: AsyncOpenAI) -> None:
    asked: Any = {
        "input": say("<think>\nHm.\n</think>\n\nGrüße"),
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = await said.responses.create(model=MODEL, **asked)
    events, final = await streamed(said, **asked)
    for response in (whole, final):
        part: Any = response.output[-1]
        tokens = part.content[0].logprobs
        text = b"".join(bytes(token.bytes) for token in tokens).decode()
        assert text.strip() == response.output_text.strip() == "Grüße"
        assert all(len(token.top_logprobs) == 2 for token in tokens)
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert sum(map(len, deltas)) == len(tokens)


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


async def test_errors_say_what_to_do(said: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="as input") as unknown:
        await said.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(BadRequestError, match="maximum context length") as long:
        await said.responses.create(model=MODEL, input="long " * 20_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(APIError, match="not supported"):
        await said.responses.create(model=MODEL, input="x", background=True)
