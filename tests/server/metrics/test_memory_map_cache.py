"""How often the engine is asked, and what is shown when it does not answer."""

import asyncio
import json
from typing import cast

from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.memory_map import KVMap, MemoryMap
from engine.types import EngineStats
from server.metrics.memory_map_cache import MAX_AGE_S, MemoryMapCache


class AskedClient:
    """Answers when it is told to."""

    alive = True

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[MemoryMap]] = []

    async def memory_map(self) -> MemoryMap:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    def answer(self, steps: int) -> None:
        kv = KVMap(4096, 16, 4, 1024, 4, 1, (), ())
        self.questions[-1].set_result(MemoryMap(EngineStats(steps=steps), kv, (), ()))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def caching(wait_s: float = 60.0) -> tuple[AskedClient, Clock, MemoryMapCache]:
    client, clock = AskedClient(), Clock()
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
