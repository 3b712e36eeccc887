"""The application around a real engine, and a client that holds every end of its connection."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2
import mlx.core as mx
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from engine.client import EngineClient, TokenStream
from engine.types import Request
from kvcache.views import KVViews
from server.chat.salts import Salts
from server.chat.served_model import ServedModel
from server.cli.serve import grammar_compiler
from server.config import Config, LimitsSection
from server.http.app import create_app
from server.metrics import Metrics
from server.routes.service import Service
from server.text.conversation import Conversation, Turn
from server.text.tokenizer import Tokenizer
from tests.engines import SHAPE, VOCAB, recall_loop, started
from tests.recall import RecallModel, positions_of, recall_many

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "recall"
END = "<|im_end|>"
OTHER_NAMES = ("org/alias", "/models/alias")
DEADLINE_S = 60.0  # of what would hang for ever
POLL_S = 0.002
Json = dict[str, Any]


# --- engines ---------------------------------------------------------------------------------


class Gate:
    """Lets the engine's steps through one by one, once it is closed."""

    def __init__(self) -> None:
        self.entered = 0
        """Steps that have begun."""
        self.waits = False
        """Whether a step stands at the gate."""
        self.closed = False
        self._turns = threading.Semaphore(0)

    def pass_through(self) -> None:
        """Called by the model at the beginning of a step."""
        self.entered += 1
        self.waits = self.closed
        if self.closed and not self._turns.acquire(timeout=DEADLINE_S):
            raise TimeoutError("nobody opened the gate")
        self.waits = False

    def close(self) -> None:
        """Lets nothing through that was not allowed since; what was open before is forgotten."""
        self._turns = threading.Semaphore(0)
        self.closed = True

    def allow(self, steps: int) -> None:
        """Lets that many steps through."""
        self._turns.release(steps)

    def open(self) -> None:
        """Holds nothing back any more."""
        self.closed = False
        self._turns.release(1000)


@dataclass
class ScriptedModel(RecallModel):
    """RecallModel that may wait at a gate and may be told what to say.

    The script is what it answers after a prompt of more than one token, to one request at a time;
    without one it says what RecallModel says.
    """

    gate: Gate = field(default_factory=Gate)
    script: list[int] = field(default_factory=list)
    _prompt_end: int = 0

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        self.gate.pass_through()
        logits = super().hidden(token_ids, views, rows)
        places = positions_of(views)
        if len(places) > 1:
            self._prompt_end = int(places[-1])
        if logits is None or rows is None:
            return None
        said = np.array(logits)
        for out, row in enumerate(np.array(rows).tolist()):
            number = int(places[row]) - self._prompt_end
            if 0 <= number < len(self.script):
                said[out] = 0.0
                said[out, self.script[number]] = 1.0
        return mx.array(said)


@dataclass
class Engine:
    """A started engine and the handles on its model."""

    client: EngineClient
    gate: Gate
    script: list[int]

    def rest(self) -> None:
        """Waits until the figures are of an engine without requests: they are made after the last
        event of a request has been sent."""
        deadline = time.monotonic() + DEADLINE_S
        while (stats := self.client.stats).running + stats.waiting:
            assert time.monotonic() < deadline, "somebody is still there"
            time.sleep(POLL_S)

    async def step(self) -> None:
        """Lets the step that waits at the gate run, until the next one waits there."""
        # A turn that is given before the step stands there is one too many for the rest.
        await eventually(lambda: self.gate.waits)
        entered = self.gate.entered
        self.gate.allow(1)
        await eventually(lambda: self.gate.entered > entered)

    def stop(self) -> None:
        self.gate.open()
        deadline = time.monotonic() + DEADLINE_S
        while not self.client.stop(DEADLINE_S):  # at once where it was declared dead
            assert time.monotonic() < deadline
            time.sleep(POLL_S)


def start_engine(
    *,
    max_queue: int = 64,
    max_backlog: int = 4096,
    max_share_ratio: float = 1.0,
    failing: int | None = None,
    non_finite: int | None = None,
    **changes: object,
) -> Engine:
    """failing: an input token on which the model raises. non_finite: one after which its logits are
    not numbers. changes: fields of EngineConfig."""
    gate, script = Gate(), list[int]()
    client = started(
        lambda emit: recall_loop(
            emit,
            model=lambda shape, vocab: ScriptedModel(
                shape,
                vocab,
                failing_tokens=frozenset(() if failing is None else {failing}),
                non_finite_tokens=frozenset(() if non_finite is None else {non_finite}),
                gate=gate,
                script=script,
            ),
            **changes,  # type: ignore[arg-type]
        ),
        max_queue=max_queue,
        max_backlog=max_backlog,
        max_share_ratio=max_share_ratio,
    )
    return Engine(client, gate, script)


def engine_fixture(
    scope: Literal["function", "module", "session"] = "module",
    *,
    closed: bool = False,
    **changes: Any,
) -> Any:
    """A fixture of an engine. closed: whether its gate is. changes: see ``start_engine``."""

    @pytest.fixture(scope=scope)
    def engine() -> Iterator[Engine]:
        started = start_engine(**changes)
        started.gate.closed = closed
        yield started
        started.stop()

    return engine


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token."""
    (only,) = tokenizer.fast.encode(text, add_special_tokens=False).ids
    return int(only)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """All ids of a text."""
    return list(tokenizer.fast.encode(text, add_special_tokens=False).ids)


def recalled_text(tokenizer: Tokenizer, prompt_ids: tuple[int, ...], count: int) -> str:
    """What an engine without a script answers when it is greedy."""
    ids = recall_many(prompt_ids, count, len(SHAPE.layers), VOCAB)
    return decoded(tokenizer, ids)


def recorded(engine: Engine) -> tuple[list[Request], Callable[..., list[TokenStream]]]:
    """A list of requests, and a function in place of submit that adds to it."""
    requests: list[Request] = []
    submit = engine.client.submit

    def noted(*arguments: Any, **options: Any) -> list[TokenStream]:
        streams = submit(*arguments, **options)
        requests.append(streams[0].request)
        return streams

    return requests, noted


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of all ids at once."""
    return tokenizer.fast.decode(ids, skip_special_tokens=True)


# --- the application -------------------------------------------------------------------------


def make_service(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: Config | None = None,
    *,
    defaults: Json | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    secret: bytes | None = None,
) -> Service:
    """A service of one model under several names. secret: of its salts; None: one that no other
    service of the same engine has, and that ends with it."""
    model = ServedModel((MODEL, *OTHER_NAMES), defaults or {}, stop_token_ids)
    config = config or Config()
    grammars = grammar_compiler(config, tokenizer, model, client.limits.vocab_size)
    salts = Salts(secret or os.urandom(32), outlives_process=secret is not None)
    return Service(config, model, tokenizer, client, Metrics(client), grammars, salts)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[FastAPI]:
    """The application, attached to this event loop until all its requests have ended."""
    app = create_app(service)
    async with app.router.lifespan_context(app):
        yield app
        await eventually(lambda: service.client.in_flight == 0)


def http_client(app: ASGIApp) -> httpx2.AsyncClient:
    """A client in the same process. It gets what a server would send after a bug, too."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(
        transport=transport,
        base_url="http://localhost",
        headers={"Content-Type": "application/json"},
    )


@asynccontextmanager
async def serving(
    engine: EngineClient, tokenizer: Tokenizer, config: Config | None = None, **details: Any
) -> AsyncIterator[tuple[FastAPI, httpx2.AsyncClient]]:
    """The application of an engine, and its client. details: see ``make_service``."""
    service = make_service(engine, tokenizer, config, **details)
    async with running(service) as app, http_client(app) as client:
        yield app, client


@asynccontextmanager
async def own_engine(
    tokenizer: Tokenizer, config: Config | None = None, *, closed: bool = False, **changes: Any
) -> AsyncIterator[tuple[Engine, FastAPI, httpx2.AsyncClient]]:
    """A new engine, its application and its client. closed: whether its gate is. changes: see
    ``start_engine``."""
    engine = start_engine(**changes)
    engine.gate.closed = closed
    try:
        async with serving(engine.client, tokenizer, config) as (app, client):
            yield engine, app, client
    finally:
        engine.stop()


@asynccontextmanager
async def told(
    engine: Engine, tokenizer: Tokenizer, **limits: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a model that says what it is told from now on, and ends with END."""
    engine.script.clear()
    config = Config(limits=LimitsSection(**limits))
    end = tokenizer.answer_end_ids or frozenset({token_id(tokenizer, END)})
    async with serving(engine.client, tokenizer, config, stop_token_ids=end) as (_, client):
        yield client


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread or task brings about."""
    for _ in range(int(DEADLINE_S / POLL_S)):
        if condition():
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError("it did not happen in time")


# --- requests --------------------------------------------------------------------------------


def chat(text: str = "Hello", **fields: Any) -> Json:
    """A greedy chat of one message."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields


def talk(*turns: Turn, **fields: Any) -> Conversation:
    """A conversation; without turns, the one of ``chat``."""
    return Conversation(turns or (Turn("user", "Hello"),), **fields)


def prompt(text: Any = "Once upon", **fields: Any) -> Json:
    """A greedy completion."""
    return {"prompt": text, "temperature": 0} | fields


async def posted(
    http: httpx2.AsyncClient, path: str, body: Json, *, status: int = 200, **how: Any
) -> Json:
    """The answer to a request, which must have this status."""
    response = await http.post(path, json=body, **how)
    assert response.status_code == status, response.text
    answer: Json = response.json()
    return answer


class Connection:
    """One request over bare ASGI: answers are seen as they are sent, and its client may leave or
    stop reading at any time."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: Json | bytes,
        *,
        method: str = "POST",
        ends: bool = True,
        hosts: Sequence[bytes] = (b"localhost",),
        headers: Sequence[tuple[bytes, bytes]] = (),
        raw_path: bytes | None = None,
    ) -> None:
        """ends: whether the body is complete. hosts: its Host headers. raw_path: as it came over
        the wire."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode() if raw_path is None else raw_path,
            "query_string": b"",
            "root_path": "",
            "headers": [
                *((b"host", host) for host in hosts),
                (b"content-type", b"application/json"),
                *headers,
            ],
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        self.sent: list[Message] = []
        self._reading = asyncio.Event()
        self._reading.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": not ends})
        self._serving = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        await self._reading.wait()

    @property
    def status(self) -> int | None:
        """None before the answer has begun."""
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        """What has been sent so far."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def done(self) -> bool:
        """Whether the application has nothing more to do for it."""
        return self._serving.done()

    @property
    def is_taken(self) -> bool:
        """Whether the application has received all that has been sent."""
        return self._incoming.empty()

    def stop_reading(self) -> None:
        """The next write does not come back."""
        self._reading.clear()

    def read_on(self) -> None:
        """Writes come back again."""
        self._reading.set()

    def send_more(self, body: bytes) -> None:
        """The client sends what nobody asked for."""
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def leave(self) -> None:
        """The client closes the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def begins(self) -> None:
        """Waits for the first bytes of the answer."""
        await eventually(lambda: bool(self.body))

    async def end(self) -> None:
        """Waits until the application is done with it; raises what it raised."""
        async with asyncio.timeout(DEADLINE_S):
            await self._serving


def events(body: bytes | str) -> list[Json]:
    """The data of server-sent events, which must end with [DONE]."""
    text = body.decode() if isinstance(body, bytes) else body
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    assert all(block.startswith("data: {") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def streamed(chunks: list[Json], name: str = "content") -> str:
    """A field of all deltas of a chat stream, joined."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta.get(name, "") for delta in deltas)


def finish_of(chunks: list[Json]) -> str:
    """The one finish reason of a stream."""
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    (reason,) = [reason for reason in reasons if reason is not None]
    assert isinstance(reason, str)
    return reason
