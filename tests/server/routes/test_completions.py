import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import pytest

from engine.client import EngineClient
from engine.types import FinishReason
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import (
    COMPLETIONS,
    MODEL,
    Engine,
    events,
    finish_of,
    ids_of,
    posted,
    prompt,
    recalled_text,
    serving,
)
from tests.server.streams import PreparedClient, said, scored

CONTEXT = 400  # tokens; see tests.engines


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    return await posted(http, COMPLETIONS, prompt(**fields))


async def stream(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(COMPLETIONS, json=prompt(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events(response.text)


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_continued(
    http: httpx2.AsyncClient, tokenizer: Tokenizer, as_ids: bool
) -> None:
    ids = ids_of(tokenizer, "Once upon")
    found = await answer(http, text=ids if as_ids else "Once upon", max_tokens=12)
    (choice,) = found["choices"]
    assert choice["text"] == recalled_text(tokenizer, tuple(ids), 12)
    assert choice["finish_reason"] == "length"
    assert (found["object"], found["model"]) == ("text_completion", MODEL)
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["usage"]["total_tokens"] == len(ids) + 12


async def test_a_stream_says_the_same_piece_by_piece(http: httpx2.AsyncClient) -> None:
    whole = await answer(http, max_tokens=30)
    chunks = await stream(http, max_tokens=30)
    assert text_of(chunks) == whole["choices"][0]["text"]
    assert finish_of(chunks) == "length"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_is_streamed_last_where_it_was_asked_for(http: httpx2.AsyncClient) -> None:
    whole = await answer(http, max_tokens=5)
    *chunks, last = await stream(http, max_tokens=5, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("length", "tokens"),
    [({}, 16), ({"max_tokens": 3}, 3), ({"max_tokens": -1}, CONTEXT - len("Once upon"))],
)
async def test_an_answer_has_at_most_the_tokens_that_were_asked_for(
    engine: Engine,
    tokenizer: Tokenizer,
    http: httpx2.AsyncClient,
    length: dict[str, int],
    tokens: int,
) -> None:
    engine.script[:] = ids_of(tokenizer, "x") * CONTEXT
    assert (await answer(http, **length))["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("as_stream", [False, True])
async def test_a_stop_string_is_never_sent(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient, as_stream: bool
) -> None:
    engine.script[:] = ids_of(tokenizer, "one STO STOP two")
    fields: dict[str, Any] = {"stop": ["STOP", "two"], "max_tokens": 16}
    if as_stream:
        chunks = await stream(http, **fields)
        assert (text_of(chunks), finish_of(chunks)) == ("one STO ", "stop")
    else:
        (choice,) = (await answer(http, **fields))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one STO ", "stop")


async def test_thoughts_are_not_taken_out_of_a_text(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "<think>Hm.</think>Yes.<|im_end|>")
    found = await answer(http, max_tokens=16)
    assert found["choices"][0]["text"] == "<think>Hm.</think>Yes."
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_half_a_character_at_the_end_becomes_a_replacement_character(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "a😀")
    (choice,) = (await answer(http, max_tokens=3))["choices"]
    assert choice["text"] == "a\N{REPLACEMENT CHARACTER}"
    # It may be a stop string as well as any other text.
    (choice,) = (await answer(http, max_tokens=3, stop="\N{REPLACEMENT CHARACTER}"))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")


async def test_log_probabilities_are_parallel_lists(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "abc")
    lists = (await answer(http, max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "c"]
    assert lists["text_offset"] == [0, 1, 2]
    assert [len(top) for top in lists["top_logprobs"]] == [2, 2, 2]
    for token, value, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[token] == value < 0


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


async def test_several_prompts_are_answered_at_the_same_time(http: httpx2.AsyncClient) -> None:
    chunks = await stream(http, text=["Once", "Twice"], max_tokens=8)
    order = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
    assert order != sorted(order)


async def test_prompts_without_a_seed_have_each_their_own(http: httpx2.AsyncClient) -> None:
    found = await answer(http, text=["Once"] * 4, temperature=2, max_tokens=12)
    assert len({choice["text"] for choice in found["choices"]}) == 4


async def test_more_answers_than_the_server_has_room_for_are_refused(
    engine: Engine, http: httpx2.AsyncClient
) -> None:
    prompts = ["x"] * 64
    response = await http.post(COMPLETIONS, json=prompt(n=8) | {"prompt": prompts})
    assert engine.client.capacity < 8 * 64
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"][:29]) == ("prompt", "n is 8 and there are 64 promp")


async def test_the_priority_of_a_completion_reaches_the_engine(tokenizer: Tokenizer) -> None:
    client = PreparedClient([said(tokenizer, "a")])
    async with of_prepared(client, tokenizer) as http:
        await answer(http, priority=-3)
    assert client.streams[0].request.priority == -3


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
    assert [stream.request.params.prompt_logprobs for stream in client.streams] == [1, 1]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_an_echoed_prompt_needs_no_answer(tokenizer: Tokenizer, logprobs: int | None) -> None:
    client = PreparedClient([[scored(-1.0, finish=FinishReason.LENGTH)]])
    async with of_prepared(client, tokenizer) as http:
        found = await answer(http, text="ab", max_tokens=0, echo=True, logprobs=logprobs)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert found["usage"]["completion_tokens"] == 0
    assert client.streams[0].request.params.max_tokens == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]


async def test_the_token_that_ends_a_text_is_one_of_its_tokens(
    engine: Engine, tokenizer: Tokenizer, http: httpx2.AsyncClient
) -> None:
    engine.script[:] = ids_of(tokenizer, "é<|im_end|>")
    (choice,) = (await answer(http, max_tokens=9, logprobs=0))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("é", "stop")
    assert choice["logprobs"]["tokens"][2:] == ["<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


async def test_completions_are_found_without_v1_as_well(http: httpx2.AsyncClient) -> None:
    response = await http.post("/completions", json=prompt(max_tokens=2))
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (prompt(model="gpt-5"), 404, "model"),
        ({}, 400, "prompt"),
        (prompt(""), 400, "prompt"),
        (prompt([]), 400, "prompt"),
        (prompt([VOCAB]), 400, "prompt"),
        (prompt([1, -1]), 400, "prompt[1]"),
        (prompt(None), 400, "prompt"),
        ({"prompt": ["one", ""]}, 400, "prompt[1]"),
        ({"prompt": ["one", 2]}, 400, "prompt[1]"),
        ({"prompt": [[1], [VOCAB]]}, 400, "prompt[1]"),
        ({"prompt": ["one", "x" * CONTEXT]}, 400, "prompt[1]"),
        ({"prompt": ["one"] * 65}, 400, "prompt"),
        (prompt(best_of=2), 400, "best_of"),
        (prompt(suffix="the end"), 400, "suffix"),
        (prompt(echo=True, max_tokens=-2), 400, "max_tokens"),
        ({"prompt": 5}, 400, "prompt"),
        (prompt(max_tokens=0), 400, "max_tokens"),
        (prompt(max_tokens=-2), 400, "max_tokens"),
        (prompt(max_tokens=2**31), 400, "max_tokens"),
        (prompt(temperature=float("nan")), 400, "temperature"),
        (prompt(logit_bias={"x": 1}), 400, "logit_bias"),
        (prompt(n=9), 400, "n"),
        (prompt("\udfff"), 400, "prompt"),
        (prompt("x" * CONTEXT), 400, "prompt"),
        (prompt("x" * 1_000_000), 400, "prompt"),
        (prompt([1] * CONTEXT), 400, "prompt"),
    ],
)
async def test_bad_input_is_refused_with_the_name_of_its_parameter(
    http: httpx2.AsyncClient, body: Any, status: int, param: str | None
) -> None:
    response = await http.post(COMPLETIONS, content=json.dumps(body))
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


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
