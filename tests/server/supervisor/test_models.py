"""Loading, memory and ends, as clients of the front meet them."""

import asyncio
import math
import os
import signal
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import pytest

from server.supervisor.models import (
    MAX_CLIENTS,
    MAX_TURN_S,
    PLACE_KEPT_S,
    KeepAlive,
    MemoryNeeds,
)
from server.supervisor.process import ANSWER_TIMEOUT_S, LoadError
from tests.server.harness import CHAT, eventually
from tests.server.supervisor.conftest import NEEDS, Make, Source, served

JSON = {"content-type": "application/json"}
# Of the budget: a model with its least K and V takes 120, with all that it can use 150.
ROOM_FOR_TWO, ROOM_FOR_ONE = 260, 150


async def ask(client: httpx2.AsyncClient, model: str, **fields: Any) -> httpx2.Response:
    return await client.post(CHAT, json={"model": model} | fields)


async def test_a_model_is_loaded_when_it_is_asked_for_and_stays(several: Make) -> None:
    async with served(several()) as (models, client):
        first, second = await ask(client, "a"), await ask(client, "a")
        assert (first.status_code, first.json()["name"]) == (200, "a")
        assert first.json()["pid"] == second.json()["pid"]
        assert [its.name for its in models.models.loaded] == ["a"]
        assert (await ask(client, "b")).json()["pid"] != first.json()["pid"]


async def test_requests_that_come_together_load_a_model_once(several: Make) -> None:
    async with served(several(does={"a": {"load_s": 0.2}})) as (models, client):
        answers = await asyncio.gather(*(ask(client, "a") for _ in range(5)))
        assert len({answer.json()["pid"] for answer in answers}) == 1
        assert models.model("a").loads == 1


async def test_a_newcomer_gets_idle_k_and_v_of_others_before_any_model_ends(several: Make) -> None:
    async with served(several(ROOM_FOR_TWO)) as (models, client), asyncio.timeout(ANSWER_TIMEOUT_S):
        assert (await ask(client, "a")).json()["limit"] == 50
        assert (await ask(client, "b")).json()["limit"] == 20
        assert (await ask(client, "a")).json()["limit"] == 40
        assert models.models.free_bytes == 0


async def test_k_and_v_that_are_in_use_are_not_taken(several: Make) -> None:
    async with served(several(ROOM_FOR_TWO, does={"a": {"keeps": 45}})) as (models, client):
        await ask(client, "a")
        refused = await ask(client, "b")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_memory_for_model"
        assert models.model("a").kv_bytes >= 45


async def test_a_process_that_does_not_say_what_it_gives_back_keeps_it(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.process.ANSWER_TIMEOUT_S", 0.05)
    models = several(ROOM_FOR_TWO, does={"a": {"answers_after_s": 0.3}})
    async with served(models) as (_, client):
        await ask(client, "a")
        assert (await ask(client, "b")).status_code == 503
        assert models.model("a").kv_bytes == 50
        await asyncio.sleep(0.4)
        assert models.model("a").kv_bytes == 50, "it was told otherwise since"


async def test_a_process_that_ends_when_it_is_asked_for_memory_leaves_all_of_it(
    several: Make,
) -> None:
    async with served(several(ROOM_FOR_TWO, does={"a": {"dies": True}})) as (models, client):
        await ask(client, "a")
        assert (await ask(client, "b")).json()["limit"] == 50
        assert models.model("a").ends["failed"] == 1


async def test_the_model_that_was_used_longest_ago_makes_room_once_it_is_idle(
    several: Make,
) -> None:
    async with served(several(ROOM_FOR_TWO)) as (models, client):
        clock = models.clock
        await ask(client, "a")
        clock.now += 10
        await ask(client, "b")
        clock.now += 30
        refused = await ask(client, "c")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "20")
        clock.now += 25
        assert (await ask(client, "c")).status_code == 200
        assert {its.name for its in models.models.loaded} == {"b", "c"}
        assert models.model("a").ends["room"] == 1


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"pause_s": 0.3}),
        ("/v1/messages", {"pause_s": 0.3, "stream": True}),
        ("/v1/responses", {"stream": True, "pause_s": 0.1}),
        ("/api/chat", {"pause_s": 0.3}),
        ("/api/embed", {"input": "x"}),
        ("/api/generate", {"keep_alive": 0}),
        ("its keep_alive is over", {}),
    ],
)
async def test_a_victim_that_is_asked_for_while_another_one_ends_is_no_fault(
    several: Make, path: str, more: dict[str, Any]
) -> None:
    settings = {"evict_after_idle_s": 0, "keep_alive_s": 60}
    models = several(ROOM_FOR_TWO, models=settings, does={"a": {"deaf": True}}, stop_s=0.3)
    models.needs["c"] = MemoryNeeds(230, 20, 50, 64)
    async with served(models) as (_, client):
        for model in ("a", "b"):
            await ask(client, model)
            models.clock.now += 1
        large = asyncio.create_task(ask(client, "c"))
        await eventually(lambda: not models.model("a").loaded)
        if path.startswith("/"):
            answer = await client.post(path, json={"model": "b"} | more)
            assert (answer.status_code, "error" in answer.text) == (200, False)
        models.clock.now += 61
        async with models.models.use(models.model("c"), b"somebody"):
            pass
        assert (await large).status_code in (200, 503)
        assert (await ask(client, "c")).status_code == 200


# --- the line for memory -----------------------------------------------------------------------


@dataclass
class Visitor:
    """Asks for one model again and again: as it is told to where there is no room, else after a
    pause."""

    client: httpx2.AsyncClient
    model: str
    pause_s: int
    wants_at: float
    asks_at: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    """Of all that have ended."""

    async def come(self, now: float) -> None:
        answer = await ask(self.client, self.model)
        if answer.status_code == 200:
            self.waits_s.append(now - self.wants_at)
            self.asks_at = self.wants_at = now + self.pause_s
        else:
            self.asks_at = now + int(answer.headers["retry-after"])


@pytest.mark.parametrize(
    ("evict_after_idle_s", "pauses", "longest_s"),
    [
        (60, (5, 5), 60),
        (60, (5, 61), 60),
        (60, (4, 20), 60),
        (60, (17, 17, 17), 120),
        (20, (5, 5, 30), 40),
        (900, (50, 70), MAX_TURN_S),
    ],
)
async def test_no_model_starves_and_none_is_swapped_for_every_turn(
    several: Make, evict_after_idle_s: int, pauses: tuple[int, ...], longest_s: float
) -> None:
    models = several(ROOM_FOR_ONE, models={"evict_after_idle_s": evict_after_idle_s})
    clock, seconds = models.clock, int(2.5 * longest_s)
    async with served(models) as (_, client):
        each = zip("abc", pauses, strict=False)
        visitors = [Visitor(client, name, pause_s, clock.now) for name, pause_s in each]
        for _ in range(seconds):
            for visitor in visitors:
                if visitor.asks_at <= clock.now:
                    await visitor.come(clock.now)
            clock.now += 1
    for visitor in visitors:
        waits_s = [*visitor.waits_s, clock.now - visitor.wants_at]
        assert max(waits_s) <= longest_s + 2, visitor.model
    turns = seconds / min(evict_after_idle_s, MAX_TURN_S)
    assert sum(model.loads for model in models.models.models.values()) <= turns + 1


async def test_who_waits_longest_gets_the_model_once_its_answers_have_ended(
    several: Make,
) -> None:
    async with served(several(ROOM_FOR_ONE)) as (models, client):
        clock = models.clock
        await ask(client, "a")
        for name, after in (("b", "60"), ("c", "55")):
            refused = await ask(client, name)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, after)
            clock.now += 5
        slow = asyncio.create_task(ask(client, "a", stream=True, pause_s=0.3))
        await eventually(lambda: models.model("a").users == 1)
        clock.now += 50
        early = await ask(client, "c")
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        waiting = asyncio.create_task(ask(client, "b"))
        await eventually(lambda: models.model("a").yields_to is not None)
        late = await ask(client, "a")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "no_memory_for_model")
        assert (await slow).text.count("piece") == 3, "an answer that runs ends by itself"
        assert (await waiting).status_code == 200
        clock.now += 5
        assert (await ask(client, "c")).status_code == 503, "the other one has its turn"
        assert (models.model("b").loads, models.model("c").loads) == (1, 0)


async def test_who_goes_loses_the_place_and_the_model_in_use_answers_again(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(several(ROOM_FOR_ONE, models={"evict_after_idle_s": 10})) as (models, client):
        clock = models.clock
        await ask(client, "a")
        await ask(client, "b")
        clock.now += 11
        async with models.models.use(models.model("a"), b"somebody"):
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(CHAT, json={"model": "b"}, timeout=0.3)
            await eventually(lambda: not models.model("b").users)
            assert (await ask(client, "a")).status_code == 503, "the other one may come again"
            clock.now += PLACE_KEPT_S + 2
            assert (await ask(client, "a")).status_code == 200
            assert (await ask(client, "b")).status_code == 503, "its wait begins again"
            assert (await ask(client, "a")).status_code == 200


async def test_memory_that_gets_free_is_for_who_waits_longest(several: Make) -> None:
    async with served(several(ROOM_FOR_ONE)) as (models, client):
        clock = models.clock
        await ask(client, "a")
        for name in ("b", "c"):
            assert (await ask(client, name)).status_code == 503
            clock.now += 31
        os.kill(models.pid("a"), signal.SIGKILL)
        await eventually(lambda: models.model("a").process is None)
        assert (await ask(client, "c")).status_code == 503
        assert (await ask(client, "b")).status_code == 200


async def test_no_model_ends_for_one_that_would_not_fit_all_the_same(several: Make) -> None:
    models = several(ROOM_FOR_TWO, models={"pinned": ["a"], "evict_after_idle_s": 0})
    models.needs["c"] = MemoryNeeds(200, 20, 50, 64)
    async with served(models) as (_, client):
        await eventually(lambda: len(models.models.loaded) == 1)
        await ask(client, "b")
        assert (await ask(client, "c")).status_code == 503
        assert {its.name for its in models.models.loaded} == {"a", "b"}


async def test_a_model_that_can_never_fit_is_not_listed_and_says_why(several: Make) -> None:
    models = several(ROOM_FOR_TWO)
    models.needs["c"] = MemoryNeeds(300, 20, 50, 64)
    async with served(models) as (_, client):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["a", "b"]
        assert (await client.get("/v1/models/c")).status_code == 404
        message = (await ask(client, "c")).json()["error"]["message"]
        assert "needs 320 bytes, and all models together may have 260" in message


async def test_a_model_whose_files_are_wrong_is_not_listed_and_says_why(several: Make) -> None:
    models = several()
    models.needs["b"] = LoadError("config.json: it has no layers")
    async with served(models) as (_, client):
        for _ in range(2):
            found = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
            assert found == ["a", "c"]
        assert "it has no layers" in (await ask(client, "b")).json()["error"]["message"]


async def test_a_model_goes_when_nobody_wants_it_any_more(several: Make) -> None:
    async with served(several(models={"keep_alive_s": 60})) as (models, client):
        await ask(client, "a")
        models.clock.now += 59
        await ask(client, "b")
        assert {its.name for its in models.models.loaded} == {"a", "b"}
        models.clock.now += 2
        await ask(client, "b")
        await eventually(lambda: [its.name for its in models.models.loaded] == ["b"])
        assert models.model("a").ends["keep_alive"] == 1
        assert models.model("b").kv_bytes == NEEDS.most_kv_bytes


async def test_what_a_model_leaves_goes_to_the_others(several: Make) -> None:
    async with served(several(ROOM_FOR_TWO, models={"keep_alive_s": 60})) as (models, client):
        await ask(client, "a")
        models.clock.now += 30
        assert (await ask(client, "b")).json()["limit"] == 20
        models.clock.now += 31
        await ask(client, "b")
        await eventually(lambda: models.model("b").kv_bytes == 50)
        assert (await ask(client, "b")).json()["limit"] == 50


async def test_pinned_models_are_loaded_at_the_start_and_stay(several: Make) -> None:
    async with served(several(models={"pinned": ["b"], "keep_alive_s": 0})) as (models, client):
        waits = await client.get("/ready")
        await eventually(lambda: models.model("b").loaded)
        assert waits.status_code in (200, 503)
        assert (await client.get("/ready")).status_code == 200
        models.clock.now += 1000
        await ask(client, "a")
        await eventually(lambda: not models.model("a").loaded)
        assert models.model("b").loaded


async def test_a_pinned_model_that_does_not_load_keeps_the_server_from_being_ready(
    several: Make,
) -> None:
    models = several(models={"pinned": ["b"]}, does={"b": {"fail": "it is broken"}})
    async with served(models) as (_, client):
        await eventually(lambda: models.model("b").failed is not None)
        assert (await client.get("/ready")).status_code == 503


async def test_a_model_that_does_not_load_says_why_and_is_tried_again_later(
    several: Make,
) -> None:
    models = several(does={"a": {"fail": "its tokenizer is missing"}})
    async with served(models) as (_, client):
        for _ in range(2):
            answer = await ask(client, "a")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "its tokenizer is missing" in answer.json()["error"]["message"]
        assert models.models.free_bytes == 1000
        models.does.clear()
        models.clock.now += 10
        assert (await ask(client, "a")).status_code == 200


async def test_a_process_that_cannot_be_started_is_an_answer(several: Make) -> None:
    async with served(several(command=("/no/such/program",))) as (_, client):
        answer = await ask(client, "a")
        assert answer.status_code == 503
        assert "No such file" in answer.json()["error"]["message"]


async def test_a_process_that_ends_before_it_is_ready_is_an_answer(several: Make) -> None:
    async with served(several(command=("/bin/false",))) as (_, client):
        message = (await ask(client, "a")).json()["error"]["message"]
        assert "ended before it was ready" in message


async def test_a_killed_process_ends_its_answers_and_the_next_request_has_the_model_again(
    several: Make,
) -> None:
    async with served(several()) as (models, client):
        await ask(client, "a")
        slow = asyncio.create_task(ask(client, "a", stream=True, pause_s=20))
        await eventually(lambda: models.model("a").users == 1)
        await asyncio.sleep(0.1)
        os.kill(models.pid("a"), signal.SIGKILL)
        assert '"code":"model_ended"' in (await slow).text
        assert (await ask(client, "a")).status_code == 200
        assert (models.model("a").loads, models.model("a").ends["failed"]) == (2, 1)


async def test_a_process_whose_gpu_memory_failed_is_started_again_at_once(several: Make) -> None:
    async with served(several()) as (models, client):
        await ask(client, "a")
        assert (await ask(client, "a", die=4)).status_code == 503
        await eventually(lambda: models.model("a").loads == 2 and models.model("a").loaded)


async def test_a_process_that_does_not_end_is_killed(several: Make) -> None:
    models = several(models={"keep_alive_s": 60}, does={"a": {"deaf": True}}, stop_s=0.1)
    async with served(models) as (_, client):
        await ask(client, "a")
        models.clock.now += 61
        await ask(client, "b")
        await eventually(lambda: not models.model("a").loaded)
        await eventually(lambda: models.model("a").process is None)


async def test_a_request_during_an_unload_waits_for_the_next_load(several: Make) -> None:
    models = several(models={"keep_alive_s": 60}, does={"a": {"deaf": True}}, stop_s=0.3)
    async with served(models) as (_, client):
        await ask(client, "a")
        models.clock.now += 61
        await ask(client, "b")
        await eventually(
            lambda: models.model("a").process is not None and not models.model("a").loaded
        )
        models.does.clear()
        assert (await ask(client, "a")).status_code == 200
        assert models.model("a").loads == 2


async def test_a_model_can_be_stopped_while_nobody_uses_it(several: Make) -> None:
    async with served(several()) as (models, client):
        await ask(client, "a")
        slow = asyncio.create_task(ask(client, "a", pause_s=0.2))
        await eventually(lambda: models.model("a").users == 1)
        assert not await models.models.stop_model(models.model("a"))
        await slow
        for _ in range(2):
            assert await models.models.stop_model(models.model("a"))
        assert models.model("a").ends["stopped"] == 1
        assert models.models.free_bytes == 1000


async def test_models_come_and_go_with_the_disk(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(several()) as (models, client):
        await ask(client, "b")
        models.names[:] = ["a", "d"]
        monkeypatch.setattr("server.supervisor.front.RESCAN_S", 0.0)
        assert (await ask(client, "d")).status_code == 200
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["a", "b", "d"], "b is loaded"


async def test_files_that_were_replaced_are_served_from_the_next_load_on(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.front.RESCAN_S", 0.0)
    async with served(several()) as (models, client):
        await ask(client, "a")
        models.created["a"] = 1
        models.needs["a"] = replace(NEEDS, max_model_len=128)
        for listed in (64, 128):
            entry, *_ = (await client.get("/v1/models")).json()["data"]
            assert (entry["context_length"], entry["loaded"]) == (listed, listed == 64)
            said = (await ask(client, "a")).json()["name"]
            assert said == ("a" if listed == 64 else "a'"), "a model that is loaded is as it was"
            await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        models.created["a"] = 2
        assert (await ask(client, "a")).json()["name"] == "a''", "nobody asked for the list"
        assert models.model("a").loads == 3


async def test_a_model_that_could_not_be_served_is_tried_again_with_other_files(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.front.RESCAN_S", 0.0)
    models = several()
    models.needs["a"] = LoadError("config.json: it has no layers")
    async with served(models) as (_, client):
        assert (await ask(client, "a")).status_code == 503
        models.needs.clear()
        assert (await ask(client, "a")).status_code == 503
        models.created["a"] = 1
        assert (await ask(client, "a")).status_code == 200


async def test_files_that_are_replaced_while_they_are_read_are_read_again(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = several()

    def needs(source: Source) -> MemoryNeeds:
        if source.created:
            return replace(NEEDS, max_model_len=128)
        models.created["a"], models.names[:] = 1, ["a", "b"]
        models.models.update(models.sources())
        return NEEDS

    monkeypatch.setattr(Source, "needs", needs)
    async with served(models) as (_, client):
        first, *_ = (await client.get("/v1/models")).json()["data"]
        assert (first["id"], first["context_length"]) == ("a", 128)


async def test_the_server_ends_while_a_model_is_being_loaded(several: Make) -> None:
    async with served(several(does={"a": {"load_s": 60}})) as (models, client):
        waiting = asyncio.create_task(ask(client, "a"))
        await eventually(lambda: "a" in models.models.models)
        await eventually(lambda: models.model("a").process is not None)
    with pytest.raises(httpx2.HTTPError):
        (await waiting).raise_for_status()


def test_a_long_time_counts_and_a_short_one_only_where_nobody_else_came_since() -> None:
    keep = KeepAlive(60.0)
    keep.used(b"one", 100.0, 500.0)
    keep.used(b"two", 110.0, 0.0)
    assert keep.until == 600.0
    keep.used(b"one", 120.0, 5.0)
    assert keep.until == 125.0, "the other one wants it no more"
    keep.used(b"two", 130.0, -1.0)
    assert keep.until == math.inf


def test_a_default_may_be_for_ever() -> None:
    keep = KeepAlive(-1.0)
    keep.used(b"one", 100.0, None)
    assert keep.until == math.inf


@pytest.mark.parametrize("more", [1, 2, 10, 100, 1000, 10_000])
def test_of_many_clients_those_are_remembered_that_want_the_model_for_longest(more: int) -> None:
    keep = KeepAlive(60.0)
    clients = [str(number).encode() for number in range(MAX_CLIENTS + more)]
    for number, client in enumerate(clients):
        keep.used(client, 0.0, 100.0 + number)
    assert keep.until == 100.0 + len(clients) - 1
    for client in clients[-MAX_CLIENTS:]:
        keep.used(client, 1.0, 0.0)
    assert keep.until == 1.0, "all others are forgotten"
