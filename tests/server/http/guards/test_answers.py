import asyncio

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.chat.drain import Drain
from server.http.guards.answers import AnswerGuard
from server.routes.service import Service
from tests.server.harness import CHAT, chat

FOR_EVER_S = 1000.0


async def test_fault_21_a_server_that_drains_lets_nobody_in_and_says_so(
    http: httpx2.AsyncClient, service: Service
) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    service.drain.begin()
    health = await http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "draining"})
    ready = await http.get("/ready")
    assert ready.status_code == 503
    for path in (CHAT, "/v1/models", "/nowhere"):
        refused = await http.post(path, json=chat())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "shutting_down"
    anthropic = await http.post("/v1/messages", json=chat())
    assert anthropic.json()["error"]["type"] == "overloaded_error"
    shown = (await http.get("/metrics")).text
    assert 'quire_refused_requests_total{reason="draining"} 4.0' in shown


async def test_who_is_cancelled_by_others_is_no_matter_of_the_drain() -> None:
    drain = Drain()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(FOR_EVER_S)

    async def receive() -> Message:
        raise AssertionError("nobody reads")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent")

    guard = AnswerGuard(wait, drain, lambda _: None)
    serving = asyncio.ensure_future(guard({"type": "http", "path": "/"}, receive, send))
    await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    drain.begin()
    assert not drain.answering
