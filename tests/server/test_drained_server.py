"""uvicorn's server, from a signal to its end: over real sockets, in this process."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import uvicorn

from server.app import create_app
from server.drained_server import DrainedServer
from server.http import CLOSE_TIMEOUT_S
from server.service import Service
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    DEADLINE_S,
    Engine,
    chat,
    events,
    eventually,
    make_service,
    start_engine,
)

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
    server = DrainedServer(config, service.client, service.drain, drain_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Signals of this process are not the server's.
        task = asyncio.ensure_future(server._serve(sockets=[listener]))
        await eventually(lambda: server.started)
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with asyncio.timeout(DEADLINE_S):
            await task


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    started = start_engine()
    yield started
    started.stop()


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
        await eventually(lambda: len(service.drain._answering) == 1)
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
    engine.client._failure = None  # so that it can be ended
