"""Texts in, vectors out; and what becomes of everything else."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from engine.types import EngineDeadError
from server.text.tokenizer import Tokenizer
from tests.engines import SHAPE, VOCAB
from tests.models import ModelSpec, write_embedding_model
from tests.recall import recall
from tests.server.harness import (
    MODEL,
    Connection,
    Engine,
    Json,
    chat,
    engine_fixture,
    eventually,
    http_client,
    posted,
    prompt,
    serving,
    token_id,
)

PATH = "/v1/embeddings"
MAX_MODEL_LEN = 100
BAD = 901


@pytest.fixture(scope="module")
def embedding_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    spec = ModelSpec(vocab_size=VOCAB)
    return Tokenizer(write_embedding_model(tmp_path_factory.mktemp("texts"), spec))


shared_pools = engine_fixture(
    pools=True,
    max_num_seqs=2,
    max_queue=2,
    max_model_len=MAX_MODEL_LEN,
    prefix_keep_s=1000.0,
    non_finite=BAD,
)


@pytest.fixture
async def pools(shared_pools: Engine, embedding_tokenizer: Tokenizer) -> AsyncIterator[FastAPI]:
    async with serving(shared_pools.client, embedding_tokenizer) as (app, _):
        yield app


@pytest.fixture
async def texts(pools: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(pools) as client:
        yield client


def place_of(ids: list[int]) -> int:
    """Where RecallModel's vector of these tokens is 1."""
    return recall(ids, len(SHAPE.layers), VOCAB)


async def places(http: httpx2.AsyncClient, **body: Any) -> list[int]:
    data = (await posted(http, PATH, body))["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    vectors = np.array([one["embedding"] for one in data])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    found: list[int] = vectors.argmax(axis=1).tolist()
    return found


async def refused(http: httpx2.AsyncClient, **body: Any) -> Json:
    error: Json = (await posted(http, PATH, body, status=400))["error"]
    return error


async def test_every_form_of_an_input_gives_the_vector_of_its_last_token(
    texts: httpx2.AsyncClient, embedding_tokenizer: Tokenizer
) -> None:
    end = token_id(embedding_tokenizer, "<|endoftext|>")
    ids = {text: [*embedding_tokenizer.fast.encode(text).ids] for text in ("ab", "abc")}
    assert all(found[-1] == end for found in ids.values())
    assert await places(texts, input="ab") == [place_of(ids["ab"])]
    assert await places(texts, input=["ab", "abc"]) == [place_of(found) for found in ids.values()]
    assert await places(texts, input=[5, 6]) == [place_of([5, 6])]
    assert await places(texts, input=[[5], [5, 6]]) == [place_of([5]), place_of([5, 6])]
    bare = await places(texts, input="ab", add_special_tokens=False)
    assert bare == [place_of(ids["ab"][:-1])]


async def test_tokens_are_counted_with_the_end_of_each_text(texts: httpx2.AsyncClient) -> None:
    answer = (await texts.post(PATH, json={"input": ["ab", "abc"], "user": "u"})).json()
    assert answer["object"] == "list"
    assert answer["model"] == MODEL
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_many_inputs_come_back_in_order_though_few_run_at_a_time(
    texts: httpx2.AsyncClient,
) -> None:
    inputs = [[7, number, 3] for number in range(40)]
    assert await places(texts, input=inputs, priority=1) == [place_of(ids) for ids in inputs]


async def test_inputs_share_what_they_begin_with_unless_a_salt_keeps_them_apart(
    texts: httpx2.AsyncClient, shared_pools: Engine
) -> None:
    head = list(range(300, 370))

    cached = shared_pools.client.stats.cached_prompt_tokens
    # Of four blocks, the second input of the first body finds those of the first one.
    for salt, shared in (("first", 64), ("first", 128), ("second", 64)):
        await places(texts, input=[[*head, 1], [*head, 2]], cache_salt=salt)
        cached += shared
        await eventually(lambda: shared_pools.client.stats.running == 0)
        await eventually(lambda: shared_pools.client.stats.cached_prompt_tokens >= cached)  # noqa: B023
        assert shared_pools.client.stats.cached_prompt_tokens == cached


@pytest.mark.parametrize("most", [MAX_MODEL_LEN])
async def test_an_input_may_fill_the_context_and_is_never_cut(
    texts: httpx2.AsyncClient, most: int, embedding_tokenizer: Tokenizer
) -> None:
    assert await places(texts, input=[3] * most) == [place_of([3] * most)]
    for given in ([3] * (most + 1), [[3], [3] * (most + 1)], "x" * most, ["x" * 100_000]):
        error = await refused(texts, input=given)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {most} tokens" in error["message"]
        assert "answer" not in error["message"]
    assert error["param"] == "input[0]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": [[1], [VOCAB]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": VOCAB + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "add_special_tokens": False, "truncate": "END"}, "truncate"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    texts: httpx2.AsyncClient, body: Json, param: str
) -> None:
    assert (await refused(texts, **body))["param"] == param


async def test_a_text_without_a_token_is_refused(
    texts: httpx2.AsyncClient, embedding_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> list[tuple[int, ...]]:
        return [()]

    monkeypatch.setattr(embedding_tokenizer, "encode_texts", nothing)
    assert (await refused(texts, input="a"))["message"] == "The input is empty."


async def test_an_unknown_model_is_not_found(texts: httpx2.AsyncClient) -> None:
    response = await texts.post(PATH, json={"input": "a", "model": "gpt"})
    assert response.status_code == 404


async def test_a_model_does_what_it_is_made_for_and_says_so(
    texts: httpx2.AsyncClient, http: httpx2.AsyncClient
) -> None:
    """http: of a model that generates."""
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", prompt())):
        response = await texts.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "model"
        assert "/v1/embeddings" in response.json()["error"]["message"]
    response = await http.post(PATH, json={"input": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert "Qwen3-Embedding" in response.json()["error"]["message"]


async def test_a_server_of_vectors_is_ready(texts: httpx2.AsyncClient) -> None:
    assert (await texts.get("/ready")).status_code == 200


async def test_a_fault_of_the_engine_is_an_error(texts: httpx2.AsyncClient) -> None:
    response = await texts.post(PATH, json={"input": [[1], [BAD], [2]]})
    assert response.status_code == 500
    assert "not finite" in response.json()["error"]["message"]


async def test_an_engine_that_has_ended_is_told(
    shared_pools: Engine, texts: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shared_pools.client

    def dead(*_: object, **__: object) -> None:
        raise EngineDeadError

    with monkeypatch.context() as patch:
        patch.setattr(client, "submit", dead)
        assert (await texts.post(PATH, json={"input": "a"})).status_code == 503
    with monkeypatch.context() as patch:
        patch.setattr(type(client), "alive", False)
        assert (await texts.post(PATH, json={"input": "a"})).status_code == 503


async def test_a_client_may_fill_the_queue_and_takes_its_inputs_along_when_it_leaves(
    shared_pools: Engine, pools: FastAPI, texts: httpx2.AsyncClient
) -> None:
    gate, client = shared_pools.gate, shared_pools.client
    gate.closed = True
    connection = Connection(pools, PATH, {"input": [[9, n] for n in range(40)]})
    # No more than twice as many as can run: the queue stays free for others.
    await eventually(lambda: client.in_flight == 4)
    full = await texts.post(PATH, json={"input": "a"})
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    connection.leave()
    await connection.end()
    gate.open()
    await eventually(lambda: client.in_flight == 0)
    assert connection.status == 499


async def test_texts_of_too_many_tokens_together_are_refused(
    shared_pools: Engine, embedding_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.chat.served_model.MAX_BODY_TOKEN_IDS", 1)
    most = MAX_MODEL_LEN  # what one text may have, all of them may
    async with serving(shared_pools.client, embedding_tokenizer) as (_, http):
        for count, status in ((1, 200), (2, 400)):
            text = "x" * (most - 1)
            response = await http.post("/v1/embeddings", json={"input": [text] * count})
            assert response.status_code == status
    assert response.json()["error"]["code"] == "too_many_values"
    assert f"more than {most} tokens together" in response.json()["error"]["message"]
