from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import pytest

from engine.client import EngineClient
from engine.types import FinishReason
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    COMPLETIONS,
    Engine,
    events,
    ids_of,
    posted,
    prompt,
    serving,
)
from tests.server.streams import PreparedClient, scored

CONTEXT = 400  # tokens; see tests.engines


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await posted(http, COMPLETIONS, prompt(**fields))


async def stream(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(COMPLETIONS, json=prompt(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events(response.text)


# --- several prompts -------------------------------------------------------------------------


def texts_of(chunks: list[dict[str, Any]], count: int) -> list[str]:
    found = [""] * count
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] += choice["text"]
    return found


@pytest.mark.parametrize("as_ids", [False, True])
async def test_several_prompts_are_answered_as_each_is_alone(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, as_ids: bool
) -> None:
    texts = ["Once upon", "Twice", "Once upon a time, and so on"]
    prompts: Any = [ids_of(tokenizer, text) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 2, "max_tokens": 8}
    alone = [await answer(http, text=prompt, **fields) for prompt in prompts]
    together = await answer(http, text=prompts, **fields)
    said = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in together["choices"]] == said
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(one["usage"][count] for one in alone)
    chunks = await stream(http, text=prompts, stream_options={"include_usage": True}, **fields)
    assert texts_of(chunks, 6) == said
    whole = together["usage"] | {"prompt_tokens_details": {}}
    assert chunks[-1]["usage"] | {"prompt_tokens_details": {}} == whole


async def test_several_prompts_share_their_steps(http: httpx2.AsyncClient, engine: Engine) -> None:
    before = engine.gate.entered
    await answer(http, text=["Once", "Twice"], max_tokens=40)
    assert 40 <= engine.gate.entered - before < 60


async def test_prompts_without_a_seed_have_each_their_own(http: httpx2.AsyncClient) -> None:
    found = await answer(http, text=["Once"] * 4, temperature=2, max_tokens=12)
    assert len({choice["text"] for choice in found["choices"]}) == 4


# --- echo ------------------------------------------------------------------------------------


@asynccontextmanager
async def of_prepared(
    client: PreparedClient, tokenizer: Tokenizer
) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(cast(EngineClient, client), tokenizer) as (_, http):
        yield http


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_echoed_before_each_of_its_answers(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, as_ids: bool
) -> None:
    texts = ["<|im_start|>Once é", "Twice"]
    prompts: Any = [ids_of(tokenizer, text) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {"seed": 7, "temperature": 1.0, "n": 2, "max_tokens": 5}
    plain = await answer(http, text=prompts, **fields)
    echoed = await answer(http, text=prompts, echo=True, **fields)
    expected = [
        texts[number // 2] + choice["text"] for number, choice in enumerate(plain["choices"])
    ]
    assert [choice["text"] for choice in echoed["choices"]] == expected
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert texts_of(await stream(http, text=prompts, echo=True, **fields), 4) == expected


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echoed_prompt_has_its_log_probabilities(
    tokenizer: Tokenizer, as_stream: bool, as_ids: bool
) -> None:
    # What lm-eval asks for: it leaves out the last token, which must be the generated one.
    ids = [ids_of(tokenizer, text) for text in ("ab é", "c<|im_end|>")]
    batch = [
        scored(-1.0, -2.0, -3.0, -4.0, token_id=ids_of(tokenizer, "x")[0], logprob=-5.0),
        scored(-6.0, token_id=ids[1][1], logprob=-7.0, choice=1),
    ]
    batch = [event._replace(finish=FinishReason.LENGTH) for event in batch]
    client = PreparedClient([batch])
    fields: dict[str, Any] = {
        "text": ids if as_ids else ["ab é", "c<|im_end|>"],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
    }
    async with of_prepared(client, tokenizer) as http:
        if as_stream:
            choices = [c for chunk in await stream(http, **fields) for c in chunk["choices"]]
        else:
            choices = (await answer(http, **fields))["choices"]
    assert [choice["text"] for choice in choices] == ["ab éx", "c<|im_end|>"]
    first, second = (choice["logprobs"] for choice in choices)
    half = "\N{REPLACEMENT CHARACTER}"
    assert first["tokens"] == ["a", "b", " ", half, half, "x"]
    assert first["text_offset"] == [0, 1, 2, 3, 3, 4]
    assert first["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert first["top_logprobs"][:2] == [None, {"b": -1.0}]
    assert second["token_logprobs"] == [None, -6.0, -7.0]
    assert second["text_offset"] == [0, 1, 11]
    assert [stream.request.params[0].prompt_logprobs for stream in client.streams] == [1, 1]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_an_echoed_prompt_needs_no_answer(tokenizer: Tokenizer, logprobs: int | None) -> None:
    client = PreparedClient([[scored(-1.0, finish=FinishReason.LENGTH)]])
    async with of_prepared(client, tokenizer) as http:
        found = await answer(http, text="ab", max_tokens=0, echo=True, logprobs=logprobs)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert found["usage"]["completion_tokens"] == 0
    assert client.streams[0].request.params[0].max_tokens == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]


async def test_completions_are_found_without_v1_as_well(http: httpx2.AsyncClient) -> None:
    response = await http.post("/completions", json=prompt(max_tokens=2))
    assert response.status_code == 200


async def test_prompts_of_too_many_tokens_together_are_refused(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one text may have, all of them may."""
    monkeypatch.setattr("server.chat.served_model.MAX_BODY_TOKEN_IDS", 1)
    async with serving(engine.client, tokenizer) as (_, http):
        for count, status in ((1, 200), (2, 400)):
            body = prompt(["x" * (CONTEXT // 2 + 1)] * count, max_tokens=1)
            response = await http.post(COMPLETIONS, json=body)
            assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == "too_many_values"
