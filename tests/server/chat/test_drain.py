"""The end of serving: who is let in, who may finish, and how the others end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from server.chat.drain import Drain
from server.config import Config
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Connection,
    Engine,
    chat,
    engine_fixture,
    events,
    eventually,
    make_service,
    prompt,
    running,
    start_engine,
)
from tests.simulation.runner import Clock

FOR_EVER_S = 1000.0
STREAMS = {
    CHAT: chat(max_tokens=300, stream=True),
    COMPLETIONS: prompt(max_tokens=300, stream=True),
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 300,
        "stream": True,
    },
    "/v1/responses": {"input": "Hi", "max_output_tokens": 300, "stream": True},
}


own_engine = engine_fixture("function", closed=True)


@pytest.fixture
def service(own_engine: Engine, tokenizer: Tokenizer) -> Service:
    return make_service(own_engine.client, tokenizer, Config())


@asynccontextmanager
async def begun(
    app: FastAPI, service: Service, path: str, **fields: object
) -> AsyncIterator[Connection]:
    """A request that waits at the gate."""
    before = service.client.in_flight
    connection = Connection(app, path, STREAMS[path] | fields)
    await eventually(lambda: service.client.in_flight > before)
    yield connection


async def test_fault_21_those_who_are_there_may_finish(
    app: FastAPI, service: Service, own_engine: Engine
) -> None:
    async with begun(app, service, CHAT, max_tokens=5) as stream:
        service.drain.begin()
        draining = asyncio.ensure_future(service.drain.finish(service.client, FOR_EVER_S))
        own_engine.gate.open()
        await stream.end()
        assert len(events(stream.body)) > 1, "to [DONE]"
        await draining
    assert service.drain.has_cut


@pytest.mark.parametrize("path", STREAMS)
async def test_fault_21_a_stream_that_is_not_finished_ends_with_an_error_event(
    app: FastAPI, service: Service, path: str
) -> None:
    async with begun(app, service, path) as stream:
        service.drain.begin()
        await service.drain.finish(service.client, 0.0)
        await stream.end()
    text = stream.body.decode()
    *_, last, end = text.split("\n\n")
    assert end == ""
    assert "[DONE]" not in text
    told = json.loads(last.partition("data: ")[2])
    assert "shutting down" in json.dumps(told)
    assert not stream.sent[-1].get("more_body", False), "the response is complete"


@pytest.mark.parametrize("path", STREAMS)
async def test_fault_21_a_whole_answer_that_is_not_finished_is_an_error_of_its_api(
    app: FastAPI, service: Service, path: str
) -> None:
    async with begun(app, service, path, stream=False) as whole:
        service.drain.begin()
        await service.drain.finish(service.client, 0.0)
        await whole.end()
    assert whole.status == 503
    assert (b"retry-after", b"1") in whole.sent[0]["headers"]
    assert "shutting down" in json.loads(whole.body)["error"]["message"]


async def test_fault_21_vectors_that_are_not_finished_are_an_error(tokenizer: Tokenizer) -> None:
    engine = start_engine(pools=True)
    engine.gate.closed = True
    service = make_service(engine.client, tokenizer)
    async with running(service) as app:
        whole = Connection(app, "/v1/embeddings", {"input": ["some", "texts"]})
        await eventually(lambda: service.client.in_flight == 2)
        service.drain.begin()
        await service.drain.finish(service.client, 0.0)
        await whole.end()
        assert whole.status == 503
        assert json.loads(whole.body)["error"]["code"] == "shutting_down"
        engine.gate.open()
    engine.stop()


async def test_fault_21_a_second_signal_waits_for_nobody(app: FastAPI, service: Service) -> None:
    async with begun(app, service, CHAT) as stream:
        service.drain.begin()
        draining = asyncio.ensure_future(service.drain.finish(service.client, FOR_EVER_S))
        await asyncio.sleep(0.1)
        assert not draining.done()
        service.drain.begin()
        await draining
        await stream.end()
    assert b"shutting down" in stream.body


async def test_the_time_counts_from_the_signal(
    app: FastAPI, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.chat.drain.LAST_WORDS_S", 0.02)
    clock = Clock()
    drain = Drain(clock)
    object.__setattr__(service, "drain", drain)
    drain.enter(asyncio.ensure_future(asyncio.sleep(FOR_EVER_S)))
    drain.begin()
    clock.now = 5.0
    draining = asyncio.ensure_future(drain.finish(service.client, 10.0))
    await asyncio.sleep(0.05)
    assert not drain.has_cut
    clock.now = 10.0
    await draining
    assert drain.has_cut


async def test_a_drain_does_not_wait_for_an_engine_that_has_died(
    app: FastAPI, service: Service, own_engine: Engine
) -> None:
    async with begun(app, service, CHAT) as stream:
        service.drain.begin()
        draining = asyncio.ensure_future(service.drain.finish(service.client, FOR_EVER_S))
        own_engine.client.declare_dead()
        await draining
        await stream.end()
    assert b'"error"' in stream.body


async def test_a_request_that_is_late_for_the_engine_is_told_to_come_back(
    app: FastAPI, service: Service
) -> None:
    """It was let in, and its prompt was encoded while the others were cut off."""
    request = Connection(app, CHAT, b'{"messages": ', ends=False)
    await asyncio.sleep(0.01)
    service.drain.begin()
    service.client.end_all("because")
    request.send_more(b'[{"role": "user", "content": "Hi"}]}')
    await request.end()
    assert request.status == 503
    assert json.loads(request.body)["error"]["code"] == "shutting_down"


# --- those that even an error does not reach -----------------------------------------------------


async def test_a_request_that_is_still_arriving_is_refused_when_the_time_is_over(
    app: FastAPI, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.chat.drain.LAST_WORDS_S", 0.02)
    request = Connection(app, CHAT, b'{"messages": ', ends=False)
    await asyncio.sleep(0.01)
    service.drain.begin()
    await service.drain.finish(service.client, 0.0)
    assert request.done
    await request.end()
    assert request.status == 503
    assert json.loads(request.body)["error"]["code"] == "shutting_down"


async def test_a_stream_that_nobody_reads_is_cut_off(
    app: FastAPI, service: Service, own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.chat.drain.LAST_WORDS_S", 0.02)
    async with begun(app, service, CHAT) as stream:
        await stream.begins()
        stream.stop_reading()
        sent = len(stream.sent)
        own_engine.gate.open()
        await eventually(lambda: len(stream.sent) > sent)
        service.drain.begin()
        await service.drain.finish(service.client, 0.0)
        assert stream.done
        await stream.end()
    assert b"[DONE]" not in stream.body
