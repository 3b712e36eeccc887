"""Vectors in Ollama's API."""

from collections.abc import AsyncIterator

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import ModelSpec, write_embedding_model
from tests.server.harness import (
    MODEL,
    Connection,
    Engine,
    Json,
    engine_fixture,
    eventually,
    own_engine,
    serving,
)

EMBED, EMBEDDINGS, V1 = "/api/embed", "/api/embeddings", "/v1/embeddings"
MAX_MODEL_LEN = 100


pools = engine_fixture(pools=True, max_num_seqs=2, max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    spec = ModelSpec(vocab_size=VOCAB)
    return Tokenizer(write_embedding_model(tmp_path_factory.mktemp("texts"), spec))


@pytest.fixture
async def app(pools: Engine, texts: Tokenizer) -> AsyncIterator[FastAPI]:
    async with serving(pools.client, texts) as (app, _):
        yield app


async def test_vectors_are_those_of_openais_api(http: httpx2.AsyncClient) -> None:
    asked = {"input": ["ab", "abc"], "dimensions": 900}
    theirs = (await http.post(V1, json=asked)).json()
    found = (await http.post(EMBED, json=asked | {"truncate": True, "keep_alive": "5m"})).json()
    assert found["embeddings"] == [one["embedding"] for one in theirs["data"]]
    assert found["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]
    assert (found["model"], found["load_duration"]) == (MODEL, 0)
    assert found["total_duration"] > 0
    one = (await http.post(EMBEDDINGS, json={"prompt": "ab", "options": {"num_ctx": 5}})).json()
    whole = (await http.post(V1, json={"input": "ab"})).json()["data"][0]["embedding"]
    assert one == {"embedding": whole}
    assert np.linalg.norm(whole) == pytest.approx(1)


async def test_who_embeds_nothing_is_told_at_once_that_the_model_is_there(
    http: httpx2.AsyncClient,
) -> None:
    nothing: list[Json] = [{}, {"input": ""}, {"input": []}]
    for body in nothing:
        response = await http.post(EMBED, json=body)
        assert response.json() == {"model": MODEL, "embeddings": []}
    assert (await http.post(EMBEDDINGS, json={"prompt": ""})).json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (EMBED, {"input": ["a", ""]}, "The input[1] is empty."),
        (EMBED, {"input": ["a"] * 2049}, "There are 2049 inputs"),
        (EMBED, {"input": "a", "dimensions": 10**6}, "dimensions is 1000000"),
        (EMBED, {"input": [1]}, "input"),
        (EMBED, {"input": "a", "keep_alive": "soon"}, "keep_alive is no duration"),
        (EMBED, {"input": "a" * 200}, "This model's maximum context length is 100 tokens"),
        (EMBEDDINGS, {"prompt": "a" * 200}, "This model's maximum context length is 100 tokens"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}, "This model makes"),
        ("/api/generate", {"prompt": "a"}, "This model makes"),
    ],
)
async def test_what_has_no_vector_is_named(
    http: httpx2.AsyncClient, path: str, body: dict[str, object], named: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json().keys() == {"error"}
    assert response.json()["error"].startswith(named)


async def test_it_says_that_it_makes_vectors(http: httpx2.AsyncClient) -> None:
    shown = (await http.post("/api/show", json={"model": MODEL})).json()
    assert shown["capabilities"] == ["embedding"]


@pytest.mark.parametrize(("path", "field"), [(EMBED, "input"), (EMBEDDINGS, "prompt")])
async def test_who_leaves_gets_no_vector(texts: Tokenizer, path: str, field: str) -> None:
    async with own_engine(texts, closed=True, pools=True) as (engine, app, _):
        connection = Connection(app, path, {field: "abc"})
        await eventually(lambda: engine.client.in_flight == 1)
        connection.leave()
        await connection.end()
        engine.gate.open()
