"""The two applications that clients are tested with, in this process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from engine.client import EngineClient
from engine.models.checkpoint import read_checkpoint
from server.cli.model_files import make_plan
from server.cli.serve import start_engine
from server.cli.settings import read_settings
from server.config import Config
from server.text.tokenizer import Tokenizer
from tests.clients.models import random_model, tokenizer_only
from tests.clients.parrot import STOP_TIMEOUT_S, Parrot, told_engine, told_service
from tests.engines import VOCAB
from tests.models import write_embedding_model
from tests.server.harness import http_client, running


@contextmanager
def engine_of(folder: Path, *, max_model_len: int) -> Iterator[EngineClient]:
    """An engine as the server starts it."""
    settings = read_settings(
        None, {"cache": {"kv_budget": "64MiB"}, "engine": {"max_model_len": max_model_len}}
    )
    client = start_engine(settings, make_plan(settings, read_checkpoint(folder)))
    yield client
    assert client.stop(STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def parrot_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_only(tmp_path_factory.mktemp("parrot"), VOCAB))


@pytest.fixture(scope="session")
def parrot_engine(parrot_tokenizer: Tokenizer) -> Iterator[EngineClient]:
    client = told_engine(Parrot(parrot_tokenizer), check_every_step=True)
    yield client
    assert client.stop(STOP_TIMEOUT_S)


@pytest.fixture
async def parrot(
    parrot_engine: EngineClient, parrot_tokenizer: Tokenizer
) -> AsyncIterator[httpx2.AsyncClient]:
    """Says what it is told."""
    service = told_service(parrot_engine, parrot_tokenizer, Config())
    async with running(service) as app, http_client(app) as http:
        yield http


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random") / "random")


@pytest.fixture(scope="session")
def random_engine(random_folder: Path) -> Iterator[EngineClient]:
    with engine_of(random_folder, max_model_len=8192) as client:
        yield client


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("embedder") / "embedder")


@pytest.fixture(scope="session")
def embedder_engine(embedder_folder: Path) -> Iterator[EngineClient]:
    with engine_of(embedder_folder, max_model_len=1024) as client:
        yield client


@pytest.fixture
async def embedder(
    embedder_engine: EngineClient, embedder_folder: Path
) -> AsyncIterator[httpx2.AsyncClient]:
    """Random weights that make vectors of texts."""
    service = told_service(embedder_engine, Tokenizer(embedder_folder), Config())
    async with running(service) as app, http_client(app) as http:
        yield http


@pytest.fixture
async def random(
    random_engine: EngineClient, random_folder: Path
) -> AsyncIterator[httpx2.AsyncClient]:
    """Random weights: what it says makes sense only where a grammar holds it."""
    service = told_service(random_engine, Tokenizer(random_folder), Config())
    async with running(service) as app, http_client(app) as http:
        yield http
