import asyncio

import httpx2
import pytest

from server.http import idle_memory
from server.http.idle_memory import release_when_idle
from server.routes.service import Service
from tests.server.harness import CHAT, Engine, chat, eventually


async def test_memory_is_released_again_and_again_when_those_who_asked_have_left(
    engine: Engine, service: Service, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = 0

    def release() -> None:
        nonlocal released
        released += 1

    async def released_in_a_while() -> int:
        before = released
        await asyncio.sleep(0.1)
        return released - before

    monkeypatch.setattr(idle_memory, "LOOK_S", 0.01)
    monkeypatch.setattr(idle_memory, "release_free_memory", release)
    forgotten = 0

    def forget() -> None:
        nonlocal forgotten
        forgotten += 1

    releasing = asyncio.create_task(release_when_idle(service.drain, 0.05, forget))
    await http.get("/health")
    assert await released_in_a_while() == 0, "nobody has asked for anything"
    for _ in range(2):
        engine.gate.close()
        asking = asyncio.create_task(http.post(CHAT, json=chat(max_tokens=2)))
        await eventually(lambda: service.drain.answering > 0)
        await asyncio.sleep(0.1)  # what had begun before has ended
        assert await released_in_a_while() == 0, "somebody is there"
        engine.gate.open()
        assert (await asking).status_code == 200
        last, kept = released, forgotten
        # The engine gives memory back some time after the last answer.
        await eventually(lambda: released >= last + 3)  # noqa: B023
        await eventually(lambda: forgotten > kept)  # noqa: B023
    releasing.cancel()
