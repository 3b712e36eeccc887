import asyncio
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn

from engine.machine import raise_descriptor_limit
from server.config import Config
from server.http import server as http_server
from server.http.app import create_app
from server.http.guards.connections import MAX_HEADER_BYTES
from server.http.server import (
    CLOSE_TIMEOUT_S,
    LISTEN_BACKLOG,
    OTHER_DESCRIPTORS,
    DrainedServer,
    GuardedServer,
    connections_that_fit,
    http_config,
)
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    DEADLINE_S,
    Engine,
    chat,
    engine_fixture,
    events,
    eventually,
    make_service,
)


def test_what_uvicorn_is_told(service: Service) -> None:
    config = http_config(Config(), create_app(service), service.metrics)
    assert not config.proxy_headers
    assert not config.server_header
    assert not config.access_log
    assert config.h11_max_incomplete_event_size == MAX_HEADER_BYTES
    assert config.timeout_keep_alive == Config().limits.keep_alive_s


def test_a_system_with_few_descriptors_takes_fewer_connections(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(http_server, "log", SimpleNamespace(warning=said.append))
    monkeypatch.setattr(http_server, "connections_that_fit", lambda _: 7)
    config = http_config(Config(), create_app(service), service.metrics)
    assert config.http.rules.limits.max_connections == 7  # type: ignore[union-attr]
    assert "open files for 7 only" in "".join(said)


async def test_many_may_wait_to_be_accepted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    listen = socket.socket.listen

    class Listener(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            asked.append(backlog)
            listen(self, backlog)

    server = GuardedServer(http_config(Config(), create_app(service), service.metrics))
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        server.should_exit = True
        await server.serve([listener])
        await eventually(lambda: not server.server_state.connections)
    assert asked[-1] == LISTEN_BACKLOG


async def test_without_sockets_of_ours_there_is_nothing_to_set(service: Service) -> None:
    config = http_config(
        Config.model_validate({"server": {"port": 0}}), create_app(service), service.metrics
    )
    server = GuardedServer(config)
    server.should_exit = True
    await server.serve()


# --- open files ----------------------------------------------------------------------------------


class System:
    """What the system says of its limits, and how many files it lets a process have at most."""

    def __init__(self, soft: int, hard: int, most: int = 1_000_000) -> None:
        self.limits = (soft, hard)
        self.most = most

    def get(self, _: int) -> tuple[int, int]:
        return self.limits

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    found = System(256, 10_000)
    monkeypatch.setattr(resource, "getrlimit", found.get)
    monkeypatch.setattr(resource, "setrlimit", found.set)
    return found  # type: ignore[return-value]


def test_the_limit_is_raised_to_the_hard_one(system: System) -> None:
    assert raise_descriptor_limit() == 10_000
    assert system.limits == (10_000, 10_000)
    assert connections_that_fit(512) == 512
    assert connections_that_fit(5000) == (10_000 - OTHER_DESCRIPTORS) // 2


@pytest.mark.parametrize("infinity", [-1, 2**63 - 1])  # Linux's, a Mac's
@pytest.mark.parametrize("most", [10_240, 61_440, 122_880])
def test_and_no_further_than_the_system_lets_it(
    system: System, monkeypatch: pytest.MonkeyPatch, infinity: int, most: int
) -> None:
    monkeypatch.setattr(resource, "RLIM_INFINITY", infinity)
    system.limits, system.most = (256, infinity), most
    assert raise_descriptor_limit() == most
    assert system.limits == (most, infinity)
    assert raise_descriptor_limit() == most


def test_a_system_that_raises_nothing_leaves_what_there_is(system: System) -> None:
    system.limits, system.most = (600, 10_000), 600
    assert connections_that_fit(512) == (600 - OTHER_DESCRIPTORS) // 2
    assert system.limits == (600, 10_000)


@pytest.mark.parametrize(
    ("hard", "connections"), [(512, 128), (500, 125), (256, 64), (64, 16), (40, 4), (33, 1), (9, 1)]
)
def test_few_descriptors_leave_connections_a_share(
    system: System, hard: int, connections: int
) -> None:
    system.limits = (hard, hard)
    assert connections_that_fit(512) == connections


def test_a_system_without_a_limit_has_none(system: System) -> None:
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert connections_that_fit(5000) == 5000
    assert raise_descriptor_limit() == sys.maxsize


# --- from a signal to its end: over real sockets -------------------------------------------------


# The server looks ten times a second whether it is to end.
SEVERAL_TICKS_S = 0.3


@asynccontextmanager
async def serving(service: Service, drain_s: float) -> AsyncIterator[tuple[DrainedServer, str]]:
    """The server and its address, until it has ended by itself."""
    config = uvicorn.Config(
        create_app(service),
        http="h11",
        ws="none",
        log_config=None,
        timeout_keep_alive=1000,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = DrainedServer(config, service, drain_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.timeout(DEADLINE_S):
            await task


engine = engine_fixture("function")


async def test_fault_21_while_it_drains_it_listens_and_resets_nobody(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.gate.closed = True
    service = make_service(engine.client, tokenizer)
    async with (
        serving(service, DEADLINE_S) as (server, address),
        httpx2.AsyncClient(base_url=address, timeout=DEADLINE_S) as http,
        http.stream("POST", CHAT, json=chat(max_tokens=3, stream=True)) as response,
    ):
        port = int(address.rpartition(":")[2])
        silent, used = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        used[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await used[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(SEVERAL_TICKS_S)
        for reader, writer in (silent, used):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(DEADLINE_S):
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in answer.lower()
            writer.close()
        async with httpx2.AsyncClient(base_url=address, timeout=DEADLINE_S) as late:
            assert (await late.get("/ready")).status_code == 503
            assert (await late.get("/health")).json() == {"status": "draining"}
            refused = await late.post(CHAT, json=chat())
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        engine.gate.open()
        text = (await response.aread()).decode()
    assert len(events(text)) > 1
    assert engine.client.alive


async def test_fault_21_nobody_who_does_not_read_keeps_it_from_ending(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    service = make_service(engine.client, tokenizer)
    async with serving(service, 0.0) as (server, address):
        port = int(address.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        silent[0][1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        silent[1][1].write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        await eventually(lambda: service.drain.answering == 1)
        server.handle_exit(signal.SIGTERM, None)
        answers = [await reader.read() for reader, _ in silent]
        for _, writer in silent:
            writer.close()
    assert answers[0] == answers[2] == b""
    assert answers[1].startswith(b"HTTP/1.1 503")
    assert b"shutting_down" in answers[1]


async def test_fault_11_it_ends_when_its_engine_is_dead(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    service = make_service(engine.client, tokenizer)
    engine.gate.closed = True
    async with (
        serving(service, 100.0) as (_, address),
        httpx2.AsyncClient(base_url=address, timeout=DEADLINE_S) as http,
        http.stream("POST", CHAT, json=chat(max_tokens=300, stream=True)) as response,
    ):
        engine.client.declare_dead()
        text = (await response.aread()).decode()
    assert "the engine has ended" in text
    assert "[DONE]" not in text
