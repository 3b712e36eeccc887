import asyncio
from importlib.metadata import version

import httpx2
import pytest

from server.config import Config, ServerSection
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    DEADLINE_S,
    Connection,
    Engine,
    chat,
    eventually,
    own_engine,
    prompt,
)

IMPATIENT = Config(server=ServerSection(ready_timeout_s=0.3))
# A busy machine takes part of a second for some hundred steps.
PATIENT = Config(server=ServerSection(ready_timeout_s=3.0))


async def test_who_looks_before_it_asks_finds_quire(http: httpx2.AsyncClient) -> None:
    response = await http.get("/version")
    assert response.status_code == 200
    assert response.json() == {"name": "quire", "version": version("quire"), "models": "/v1/models"}
    for method in ("GET", "HEAD"):
        response = await http.request(method, "/")
        assert response.headers["server"] == f"quire/{version('quire')}"


async def test_a_server_whose_engine_decodes_is_ready(
    http: httpx2.AsyncClient, engine: Engine
) -> None:
    generated = engine.client.stats.generated_tokens
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})
    await eventually(lambda: engine.client.stats.generated_tokens == generated + 1)
    response = await http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_fault_10_a_server_whose_engine_is_stuck_is_alive_but_not_ready(
    tokenizer: Tokenizer,
) -> None:
    async with own_engine(tokenizer, IMPATIENT, closed=True) as (engine, _, http):
        response = await http.get("/ready")
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"
        assert (await http.get("/health")).status_code == 200
        engine.gate.open()
        # The one token may take longer than this server has patience.
        async with asyncio.timeout(DEADLINE_S):
            while (await http.get("/ready")).status_code != 200:
                pass


async def test_fault_27_figures_are_shown_while_the_engine_is_stuck(tokenizer: Tokenizer) -> None:
    """A scrape waits for nobody: it finds the snapshot of the newest step."""
    async with own_engine(tokenizer) as (engine, app, http):
        assert (await http.post(COMPLETIONS, json=prompt(max_tokens=5))).status_code == 200
        await eventually(lambda: engine.client.stats.generated_tokens == 5)
        engine.gate.closed = True
        stuck = Connection(app, COMPLETIONS, prompt("stuck"))
        entered = engine.gate.entered
        await eventually(lambda: engine.gate.entered > entered)
        async with asyncio.timeout(DEADLINE_S / 2):
            for _ in range(20):
                shown = await http.get("/metrics")
        assert shown.status_code == 200
        assert "quire_generated_tokens_total 5.0" in shown.text
        assert engine.client.step_age_s > 0
        engine.gate.open()
        await stuck.end()


async def test_a_server_is_ready_although_its_queue_is_full(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, closed=True, max_num_seqs=2, max_queue=0) as served:
        engine, app, http = served
        waiting = [Connection(app, CHAT, chat(max_tokens=1)) for _ in range(2)]
        await eventually(lambda: engine.client.in_flight == 2)
        assert (await http.post(CHAT, json=chat())).status_code == 429
        engine.gate.open()
        assert (await http.get("/ready")).status_code == 200
        for connection in waiting:
            await connection.end()


async def test_a_server_is_ready_while_every_slot_decodes(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer, PATIENT, closed=True, max_num_seqs=1) as (engine, app, http):
        busy = Connection(app, CHAT, chat(stream=True))
        await busy.begins()
        canary = Connection(app, "/ready", b"", method="GET")
        # Far fewer steps than the answer takes: the one slot stays taken all the time.
        for _ in range(300):
            if not canary.done:
                await engine.step()
        await canary.end()
        assert canary.status == 200
        assert not busy.done
        # The same server, stuck: not ready.
        assert (await http.get("/ready")).status_code == 503
        busy.leave()
        engine.gate.open()
        await busy.end()


async def test_an_agent_may_open_its_connection(http: httpx2.AsyncClient) -> None:
    answered = await http.head("/api/hello")
    assert (answered.status_code, answered.content) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_fault_11_a_server_whose_engine_has_ended_is_neither_alive_nor_ready(
    path: str, tokenizer: Tokenizer
) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        assert (await http.get(path)).status_code == 200
        engine.stop()
        response = await http.get(path)
    assert response.status_code == 503
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
