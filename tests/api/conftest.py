"""One server for the whole table, whose model says what it is told."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from engine.types import Request
from server.text.harmony import TOKENS
from server.text.tokenizer import Tokenizer
from tests.api.table import Behaviour
from tests.api.wire import Answer, Api
from tests.engines import VOCAB
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.harness import END, Engine, Json, engine_fixture, ids_of, recorded, told
from tests.templates import HARMONY_TEMPLATE

MAX_LEN = 900


@dataclass
class Server:
    """A client of the server, the model's next answer, and what the engine hears."""

    http: httpx2.AsyncClient
    engine: Engine
    tokenizer: Tokenizer
    heard: list[Request]
    end: str = END
    """The token that ends what the model says; "": it says that itself."""

    def says(self, text: str | None) -> None:
        self.engine.script[:] = [] if text is None else ids_of(self.tokenizer, text + self.end)

    def read_prompt(self, request: Request) -> str:
        return self.tokenizer.fast.decode(list(request.prompt_ids), skip_special_tokens=False)

    async def post(self, api: Api, body: Json, **how: Any) -> httpx2.Response:
        return await self.http.post(api.path, json=body, **how)

    async def ask(
        self, api: Api, body: Json, *, streamed: bool = False
    ) -> tuple[Answer, httpx2.Response]:
        response = await self.post(api, body)
        assert response.status_code == 200, response.text
        kind = response.headers["content-type"].partition(";")[0]
        assert kind == (api.media_type if streamed else "application/json")
        if streamed:
            kept = [response.headers.get(name) for name in ("cache-control", "x-accel-buffering")]
            assert kept == ["no-cache", "no"], "nobody keeps a stream, or gathers it"
        answer = api.read_stream(response.text) if streamed else api.read_whole(response.json())
        assert answer.prompt_tokens == len(self.heard[-1].prompt_ids)
        return answer, response

    async def check(self, api: Api, row: Behaviour, *, streamed: bool) -> httpx2.Response:
        """What comes back, which is compared with the row."""
        self.says(row.says)
        body = row.write(api, streamed=streamed)
        answer, response = await self.ask(api, body, streamed=streamed)
        if row.is_read:
            row.check(answer)
        return response


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and words of their own number."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    return Tokenizer(folder)


# With room for tools in its prompts. No prompt is found in the cache: the script begins where one
# has been computed.
engine = engine_fixture(
    "module",
    max_model_len=MAX_LEN,
    prefix_cache=False,
    check_every_step=False,
    max_num_batched_tokens=1024,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[Server]:
    heard, noted = recorded(engine)
    engine.client.submit = noted  # type: ignore[method-assign]
    async with told(engine, tokenizer) as http:
        yield Server(http, engine, tokenizer, heard)


@pytest.fixture(scope="session")
def harmony_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("harmony")
    write_tokenizer(folder, VOCAB, template=HARMONY_TEMPLATE, special=(*SPECIAL_TOKENS, *TOKENS))
    return Tokenizer(folder)


@pytest_asyncio.fixture(loop_scope="module")
async def harmony(engine: Engine, harmony_tokenizer: Tokenizer) -> AsyncIterator[Server]:
    """A server of a model like gpt-oss."""
    heard, noted = recorded(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.client, "submit", noted)
        async with told(engine, harmony_tokenizer) as http:
            yield Server(http, engine, harmony_tokenizer, heard, end="")


@pytest.fixture
def server(started: Server) -> Server:
    """Which has heard nothing yet."""
    started.heard.clear()
    return started
