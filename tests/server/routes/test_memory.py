"""GET /memory, beside /metrics and the pool itself."""

import asyncio
import json
from array import array
from collections import Counter
from functools import partial
from typing import Any, cast

import httpx2
import pytest

from engine.client import EngineClient
from engine.memory_map import KVMap, MemoryMap
from engine.types import EngineDeadError, EngineStats
from kvcache.inspector import GroupMap
from server.config import Config
from server.routes.memory import MAX_AGE_S, MemoryMapCache
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
    serving,
)
from tests.server.metrics.scraping import scrape
from tests.simulation.runner import Clock

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
STATES = {"f": "free", "d": "free", "c": "cached", "q": "quarantined", "r": "quarantined"}

POOL_PARTS = ("free", "live", "partial_tail", "mapped_ahead", "cached", "quarantined")


def bytes_of(told: dict[str, Any]) -> Counter[str]:
    """Bytes by what the blocks are for, counted from the letters."""
    geometry = told["geometry"]
    letters = "".join(told["heaps"])
    unmade = (geometry["max_heaps"] - len(told["heaps"])) * geometry["blocks_per_heap"]
    blocks = Counter(STATES.get(letter, "held") for letter in letters)
    blocks["free"] += unmade
    return Counter({name: count * geometry["block_bytes"] for name, count in blocks.items()})


def parts_of(pool: dict[str, Any]) -> dict[str, int]:
    held = sum(pool[f"{part}_bytes"] for part in ("live", "partial_tail", "mapped_ahead"))
    return {
        "free": pool["free_bytes"],
        "cached": pool["cached_bytes"],
        "quarantined": pool["quarantined_bytes"],
        "held": held,
    }


def engine_waited_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of applications that are made from now on."""
    cache = partial(MemoryMapCache, wait_s=seconds)
    monkeypatch.setattr("server.routes.operations.MemoryMapCache", cache)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is shown an old map because the machine is busy."""
    engine_waited_for(DEADLINE_S, monkeypatch)


async def waiting_in_step(engine: Engine, number: int) -> None:
    """Until the engine has come to that step, and waits in it."""
    await eventually(lambda: engine.gate.entered == number)


async def test_the_map_and_the_metrics_agree_with_the_pool_under_load(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every question goes to the engine, however soon it comes.
    monkeypatch.setattr("server.routes.memory.MAX_AGE_S", -1.0)
    async with own_engine(tokenizer, closed=True) as (engine, app, http):
        begun = engine.gate.entered
        text = "x" * 50
        streams = [
            Connection(app, COMPLETIONS, prompt(text + str(n % 3) * n, max_tokens=100, stream=True))
            for n in range(6)
        ]
        await eventually(lambda: engine.client.in_flight == 6)
        await eventually(lambda: engine.gate.entered > begun)
        # Figures are also made anew in a step that begins a request: the first ten begin all.
        engine.gate.allow(10)
        shared, entered = 0, engine.gate.entered + 10
        for _ in range(20):
            engine.gate.allow(3)
            entered += 3
            await waiting_in_step(engine, entered)
            # The engine waits in a step. Who looks is answered after it, with the figures of it.
            looking = asyncio.ensure_future(http.get("/memory"))
            await asyncio.sleep(0.01)
            while not looking.done():
                engine.gate.allow(1)
                entered += 1
                await waiting_in_step(engine, entered)
                await asyncio.wait({looking}, timeout=1.0)
            told, samples = looking.result().json()["map"], await scrape(http)
            for part in (*POOL_PARTS, "capacity", "free_slack"):
                assert samples[f"quire_kv_{part}_bytes", ()] == told["pool"][f"{part}_bytes"], part
            assert bytes_of(told) == Counter(parts_of(told["pool"]))
            assert samples["quire_requests_running", ()] == told["running"]
            shared += told["shared_saved_bytes"]
        assert shared > 0
        for stream in streams:
            stream.leave()
        engine.gate.open()
        for stream in streams:
            await stream.end()


async def test_recent_requests_are_told_with_their_times_and_without_contents(
    http: httpx2.AsyncClient,
) -> None:
    secret = "zebra-canary"
    usage = (await http.post(CHAT, json=chat(secret, max_tokens=7))).json()["usage"]
    response = await http.get("/memory")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert secret not in response.text
    told = response.json()
    assert (told["engine_alive"], told["model"]) == (True, "recall")
    assert told["age_s"] < DEADLINE_S
    newest = told["requests"][0]
    assert newest["prompt_tokens"] == usage["prompt_tokens"]
    assert (newest["generated_tokens"], newest["answers"], newest["finish"]) == (7, 1, "length")
    assert 0 < newest["first_token_s"] <= newest["duration_s"]
    assert newest["tokens_per_s"] > 0
    assert newest["ended_s_ago"] >= 0
    assert "ended_at" not in newest


@pytest.mark.parametrize("keys", [(), (KEY,), (KEY, OTHER)], ids=["none", "one", "two"])
async def test_of_several_keys_each_sees_its_own_requests_alone(
    engine: Engine, tokenizer: Tokenizer, keys: tuple[str, ...]
) -> None:
    config = Config.model_validate({"access": {"api_keys": keys}})
    async with serving(engine.client, tokenizer, config) as (_, http):
        mine, others = ({"x-api-key": key} for key in (KEY, OTHER))
        for length, headers in ((3, mine), (4, others), (5, mine)):
            await http.post(CHAT, json=chat(max_tokens=length), headers=headers)

        async def seen(headers: dict[str, str]) -> list[int]:
            requests = (await http.get("/memory", headers=headers)).json()["requests"]
            assert all("tenant" not in request for request in requests)
            return [request["generated_tokens"] for request in requests]

        if len(keys) == 2:
            assert (await seen(mine), await seen(others)) == ([5, 3], [4])
        else:
            # Whoever gets in may see all: with one key the other requests were refused.
            assert await seen(mine) == ([5, 3] if keys else [5, 4, 3])


async def test_one_that_left_and_one_that_failed_are_among_the_recent_requests(
    tokenizer: Tokenizer,
) -> None:
    async with own_engine(tokenizer, closed=True, failing=ord("!")) as (engine, app, http):
        leaving = Connection(app, COMPLETIONS, prompt(max_tokens=50))
        await eventually(lambda: engine.client.in_flight == 1)
        leaving.leave()
        await leaving.end()
        engine.gate.open()
        ids = [ord("!")] * 3
        assert (await http.post(COMPLETIONS, json=prompt(ids))).status_code == 500
        told = (await http.get("/memory")).json()
        assert [request["finish"] for request in told["requests"]] == ["error", "aborted"]


async def test_an_engine_that_is_stuck_is_said_to_be(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_waited_for(0.1, monkeypatch)
    async with own_engine(tokenizer, closed=True) as (engine, app, http):
        begun = engine.gate.entered
        stuck = Connection(app, COMPLETIONS, prompt(max_tokens=2))
        await eventually(lambda: engine.gate.entered > begun)
        response = await http.get("/memory")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "no_memory_map"
        engine.gate.open()
        await stuck.end()
        async with asyncio.timeout(DEADLINE_S):
            while (await http.get("/memory")).status_code != 200:
                pass


async def test_of_an_engine_that_has_ended_the_last_map_is_told(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        assert (await http.get("/memory")).json()["engine_alive"]
        engine.stop()
        told = (await http.get("/memory")).json()
        assert told["engine_alive"] is False
        assert told["map"]["geometry"]["tokens_per_block"] == 16


async def test_the_route_is_described(http: httpx2.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()["paths"]
    assert "age_s" in schema["/memory"]["get"]["description"]
    assert not [path for path in schema if path.startswith("/page") or path == "/"]


# --- the newest map ---------------------------------------------------------------------------


class AskedClient:
    """Answers when it is told to."""

    alive = True

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[MemoryMap]] = []

    async def memory_map(self) -> MemoryMap:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    def answer(self, steps: int) -> None:
        kv = KVMap([GroupMap({}, (), array("H"), ())])
        self.questions[-1].set_result(MemoryMap(EngineStats(steps=steps), kv, (), ()))


def caching(wait_s: float = 60.0) -> tuple[AskedClient, Clock, MemoryMapCache]:
    client, clock = AskedClient(), Clock(50.0)
    cache = MemoryMapCache(cast(EngineClient, client), wait_s=wait_s, clock=clock)
    return client, clock, cache


async def asked(client: AskedClient, times: int) -> None:
    """Until the engine has been asked so often."""
    while len(client.questions) < times:
        await asyncio.sleep(0)


def steps(seen: tuple[bytes, float] | None) -> int:
    assert seen is not None
    return int(json.loads(seen[0])["steps"])


async def test_many_who_look_at_once_ask_the_engine_once() -> None:
    client, _, cache = caching()
    lookups = [asyncio.ensure_future(cache.get()) for _ in range(5)]
    await asked(client, 1)
    client.answer(steps=3)
    seen = await asyncio.gather(*lookups)
    assert [steps(one) for one in seen] == [3] * 5
    assert len({id(one[0]) for one in seen if one is not None}) == 1, "encoded once"
    assert len(client.questions) == 1


async def test_a_young_map_is_shown_again_and_an_older_one_is_not() -> None:
    client, clock, cache = caching()
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 1)
    client.answer(steps=1)
    await lookup
    clock.now += MAX_AGE_S * 0.9
    seen = await cache.get()
    assert steps(seen) == 1
    assert seen is not None
    assert abs(seen[1] - MAX_AGE_S * 0.9) < 1e-9
    clock.now += MAX_AGE_S * 0.2
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 2)
    client.answer(steps=2)
    assert steps(await lookup) == 2


async def test_an_engine_that_does_not_answer_is_asked_only_once() -> None:
    client, clock, cache = caching(wait_s=0.001)
    assert await cache.get() is None
    assert await cache.get() is None
    assert len(client.questions) == 1
    client.answer(steps=7)
    while await cache.get() is None:
        pass
    clock.now += 12.0
    seen = await cache.get()
    assert len(client.questions) == 2
    assert seen is not None
    assert (steps(seen), seen[1]) == (7, 12.0)
    client.questions[-1].set_exception(EngineDeadError())
    await asyncio.sleep(0)


async def test_of_an_engine_that_has_ended_the_last_map_is_shown_with_its_age() -> None:
    client, clock, cache = caching()
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 1)
    client.answer(steps=4)
    await lookup
    clock.now += 1
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 2)
    client.questions[-1].set_exception(EngineDeadError())
    seen = await lookup
    assert seen is not None
    assert (steps(seen), seen[1]) == (4, 1.0)
    client.alive = False
    clock.now += 1
    assert await cache.get() == (seen[0], 2.0)
    assert len(client.questions) == 2
