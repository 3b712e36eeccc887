"""A process that hangs or dies at any stage, as clients of the front meet it."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from server.supervisor import process
from server.supervisor.process import MAX_REASON_CHARS, LoadError, ModelProcess
from tests.server.harness import CHAT, DEADLINE_S, eventually
from tests.server.supervisor.conftest import Make, served
from tests.server.supervisor.test_models import ROOM_FOR_ONE, ask

ANTHROPIC = {"anthropic-version": "2023-06-01"}
LATE = "its process made no progress for"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets pings be answered soon or never. Only a process that hangs is late for them."""
    for name, value in {"PING_INTERVAL_S": 0.05, "PING_TIMEOUT_S": 1.5}.items():
        monkeypatch.setattr(process, name, value)
    return monkeypatch


def message_of(answer: httpx2.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("stage", ["start", "loading"])
async def test_a_process_that_hangs_while_it_loads_is_killed_and_leaves_its_memory(
    several: Make, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    models = several(ROOM_FOR_ONE, does={"a": {"stops": stage}})
    monkeypatch.setattr(process, "STALL_TIMEOUT_S", 1.0)
    async with served(models) as (_, client):
        assert LATE in message_of(await ask(client, "a"))
        assert (models.model("a").ends["failed"], models.models.free_bytes) == (1, ROOM_FOR_ONE)
        monkeypatch.undo()
        models.does.clear()
        assert (await ask(client, "b")).status_code == 200


async def test_a_process_that_hangs_while_it_loads_is_not_said_to_be_unloaded(
    several: Make,
) -> None:
    async with served(several(does={"a": {"stops": "loading"}})) as (models, client):
        waiting = asyncio.create_task(ask(client, "a"))
        await eventually(lambda: "a" in models.models.models)
        await eventually(lambda: models.model("a").process is not None)
        answer = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert answer.json()["done_reason"] == "load"
        os.kill(models.pid("a"), signal.SIGKILL)
        assert (await waiting).status_code == 503
        answer = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert answer.json()["done_reason"] == "unload"


@pytest.mark.parametrize("stage", ["start", "loading", "ready"])
async def test_a_process_that_is_killed_at_any_stage_is_replaced(several: Make, stage: str) -> None:
    """Also by its own model: a request that it had not been sent yet loads it again."""
    always = {"evict_after_idle_s": 0}
    models = several(ROOM_FOR_ONE, models=always, does={"a": {"stops": stage}})
    async with served(models) as (_, client):
        waiting = asyncio.create_task(ask(client, "a"))
        await eventually(lambda: models.model("a").process is not None)
        if stage == "ready":
            await eventually(lambda: models.model("a").loaded)
        os.kill(models.pid("a"), signal.SIGKILL)
        models.does.clear()
        assert (await waiting).status_code in (200, 503)
        assert models.model("a").ends["failed"] == 1
        assert (await ask(client, "b")).status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        *("x" * 70_000 + "\n", "[" * 100_000, "[" * 60_000 + "\n", "7\n", '{"loaded": 1}\n', "\n"),
        *('"loaded"\n', '{"loaded": "1", "of": 2}\n', '{"number": []}\n'),
    ],
)
async def test_what_cannot_be_read_of_a_process_ends_its_load_at_once(
    several: Make, line: str
) -> None:
    async with served(several(does={"a": {"writes": line, "load_s": 30}})) as (_, client):
        async with asyncio.timeout(20):
            message = message_of(await ask(client, "a"))
        assert "says what cannot be read" in message


async def test_the_reason_of_a_process_is_bounded(several: Make) -> None:
    async with served(several(does={"a": {"fail": "x" * 60_000}})) as (_, client):
        message = message_of(await ask(client, "a"))
        assert message.count("x") == MAX_REASON_CHARS


class Child:
    """A process that says what a test has it say."""

    pid = 1

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.killed = asyncio.Event()

    def close(self) -> None:
        """As a writer, which nobody reads."""

    def write(self, _: bytes) -> None:
        """See ``close``."""

    def kill(self) -> None:
        self.killed.set()
        self.reader.feed_eof()

    async def wait(self) -> int:
        await self.killed.wait()
        return -9

    def tell(self, **message: Any) -> None:
        self.reader.feed_data(json.dumps(message).encode() + b"\n")

    def managed(self) -> ModelProcess:
        child: Any = self
        return ModelProcess("a", Path("a.sock"), child, self.reader, child, 1.0)


@pytest.mark.parametrize("twice", [{"ready": True}, {"number": 0, "kv_limit": 5}])
async def test_a_process_that_repeats_itself_is_ended(twice: dict[str, Any]) -> None:
    child = Child()
    managed = child.managed()
    asking = asyncio.create_task(managed.set_kv_limit(5))
    await asyncio.sleep(0)
    child.tell(**twice)
    child.tell(**twice)
    async with asyncio.timeout(DEADLINE_S):
        assert await managed.ended == -9
        assert await asking in (0, 5)


async def test_a_process_may_load_for_long_as_long_as_it_gets_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(process, "QUIET_S", 0.1)
    child = Child()
    managed = child.managed()
    child.tell(loaded=30, of=100)
    with capture_logs() as entries:
        for done in (0, 0, 0, 30, 60, 60):
            child.tell(loaded=done, of=100)
            await asyncio.sleep(0.05)
    quarters = [entry["event"].split()[-2] for entry in entries if "loading" in entry["event"]]
    assert quarters == ["25", "50"], "each quarter once, and none of a short load"
    for done in range(12):
        child.tell(loaded=done, of=100)
        await asyncio.sleep(0.1)
    assert not child.killed.is_set(), "it got on"
    repeating = asyncio.create_task(managed.ready())
    while not child.killed.is_set():
        child.tell(loaded=11, of=100)
        await asyncio.sleep(0.05)
    with pytest.raises(LoadError, match=LATE):
        await repeating


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_process_that_hangs_is_killed_and_its_clients_are_told(
    several: Make, impatient: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    async with served(several(ROOM_FOR_ONE, does={"a": {"stops": "ready"}})) as (models, client):
        body = {"model": "a", "stream": stream}
        answer = await client.post(path, json=body, headers=ANTHROPIC)
        assert "has ended before its answer" in answer.text
        if not answer.text.startswith((":", '{"model"')):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert models.model("a").ends["failed"] == 1
        models.does.clear()
        assert (await ask(client, "a")).status_code == 200
        assert models.model("a").loads == 2


async def test_a_long_silence_is_no_hang_while_pings_are_answered(
    several: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PING_INTERVAL_S", 0.01)
    async with served(several(does={"b": {"mute": True}})) as (_, client):
        assert (await ask(client, "a", pause_s=0.3)).status_code == 200
        monkeypatch.setattr(process, "PING_TIMEOUT_S", 0.1)
        assert "model_ended" in (await ask(client, "b", stream=True, pause_s=20)).text


async def test_a_process_that_hangs_leaves_its_memory_to_another_model(
    several: Make, impatient: pytest.MonkeyPatch
) -> None:
    models = several(ROOM_FOR_ONE, models={"evict_after_idle_s": 0}, stop_s=60.0)
    async with served(models) as (_, client):
        await ask(client, "a")
        os.kill(models.pid("a"), signal.SIGSTOP)
        async with asyncio.timeout(30):
            assert (await ask(client, "b")).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
async def test_a_request_that_a_dead_process_never_got_is_for_the_next_one(
    several: Make, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    wait_for_end = ModelProcess.gone

    async def die(process: ModelProcess) -> None:
        os.kill(process.pid, signal.SIGKILL)
        await wait_for_end(process)

    async with served(several()) as (models, client):
        await models.models.process_of(models.model("a"))
        # Nobody can connect any more, and its end is not known yet.
        (place,) = models.folder.glob("*.sock")
        place.rename(place.with_suffix(".gone"))
        monkeypatch.setattr(ModelProcess, "gone", die)
        answer = await client.post(path, json={"model": "a"}, headers=ANTHROPIC)
        assert answer.status_code == 200
        assert models.model("a").loads == 2
