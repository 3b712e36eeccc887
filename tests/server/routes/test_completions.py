import json
from typing import Any

import httpx2
import pytest

from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import (
    COMPLETIONS,
    MODEL,
    Engine,
    events,
    finish_of,
    ids_of,
    prompt,
    recalled_text,
)

CONTEXT = 400  # tokens; see tests.engines


async def answer(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(COMPLETIONS, json=prompt(**fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


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


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (prompt(model="gpt-5"), 404, "model"),
        ({}, 400, "prompt"),
        (prompt(""), 400, "prompt"),
        (prompt([]), 400, "prompt"),
        (prompt([VOCAB]), 400, "prompt"),
        (prompt([1, -1]), 400, "prompt"),
        ({"prompt": ["one", "two"]}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        (prompt(max_tokens=0), 400, "max_tokens"),
        (prompt(max_tokens=-2), 400, "max_tokens"),
        (prompt(max_tokens=2**31), 400, "max_tokens"),
        (prompt(temperature=float("nan")), 400, "temperature"),
        (prompt(logit_bias={"x": 1}), 400, "logit_bias"),
        (prompt(n=9), 400, "n"),
        (prompt(echo=True), 400, "echo"),
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
