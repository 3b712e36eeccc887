"""OpenAI's own package in this process reads vectors; make clients tries the others."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from openai import AsyncOpenAI

from engine.models.checkpoint import read_checkpoint
from server.cli.model_files import make_plan
from server.cli.serve import start_engine
from server.cli.settings import read_settings
from server.config import Config
from server.text.tokenizer import Tokenizer
from tests.clients.parrot import STOP_TIMEOUT_S, told_service
from tests.models import write_embedding_model
from tests.reference import load_reference
from tests.server.harness import MODEL, http_client, ids_of, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("embedder") / "embedder")


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Random weights that make vectors of texts."""
    settings = read_settings(
        None, {"cache": {"kv_budget": "64MiB"}, "engine": {"max_model_len": 1024}}
    )
    client = start_engine(settings, make_plan(settings, read_checkpoint(folder)))
    service = told_service(client, Tokenizer(folder), Config())
    async with running(service) as app, http_client(app) as http:
        yield http
    assert client.stop(STOP_TIMEOUT_S)


def sdk(http: httpx2.AsyncClient, *, strict: bool) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=http,
        max_retries=0,
        _strict_response_validation=strict,
    )


async def test_texts_and_ids_are_embedded_as_mlx_lm_would(
    http: httpx2.AsyncClient, folder: Path
) -> None:
    model = load_reference(read_checkpoint(folder))
    texts = ["Hello", "Once upon a time", "x"]
    tokenizer = Tokenizer(folder)
    ids = [ids_of(tokenizer, text + "<|endoftext|>") for text in texts]
    states = [model.model(mx.array([tokens]))[0, -1].astype(mx.float32) for tokens in ids]
    strict = sdk(http, strict=True)
    for given in (texts, ids):
        found = await strict.embeddings.create(model=MODEL, input=given, encoding_format="float")
        assert [one.index for one in found.data] == [0, 1, 2]
        for one, state in zip(found.data, map(np.array, states), strict=True):
            wanted = state / np.linalg.norm(state)
            assert np.abs(np.array(one.embedding) - wanted).max() < 1e-5
        assert found.usage.total_tokens == found.usage.prompt_tokens == sum(map(len, ids))


async def test_the_sdk_reads_its_own_default_encoding(http: httpx2.AsyncClient) -> None:
    """It asks for base64 and makes numbers of it, which its strict mode does not allow for."""
    loose = sdk(http, strict=False)
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
