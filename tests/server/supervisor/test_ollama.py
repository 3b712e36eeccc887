"""Ollama's API over several models."""

import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
from pydantic_core import from_json

from server.supervisor import process
from server.supervisor.process import LoadError
from tests.server.harness import eventually
from tests.server.supervisor.conftest import NEEDS, Make, served

CHAT, GENERATE, PS = "/api/chat", "/api/generate", "/api/ps"
TALK = [{"role": "user", "content": "Hello"}]


async def loaded(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get(PS)).json()["models"]
    return found


async def test_all_models_are_listed_and_those_that_are_loaded_too(several: Make) -> None:
    models = several(models={"pinned": ["b"]})
    models.needs["c"] = LoadError("it is broken")
    async with served(models) as (_, client):
        await eventually(lambda: models.model("b").loaded)
        tags = (await client.get("/api/tags")).json()["models"]
        assert [(its["name"], its["details"]["parameter_size"]) for its in tags] == [
            ("a", "4.0B"),
            ("b", "4.0B"),
        ]
        await client.post(CHAT, json={"model": "a", "messages": TALK, "stream": False})
        first, second = sorted(await loaded(client), key=lambda its: str(its["name"]))
        assert (first["name"], first["size_max"], first["context_length"]) == ("a", 150, 64)
        left = datetime.fromisoformat(first["expires_at"]) - datetime.now(UTC)
        assert timedelta(minutes=59) < left < timedelta(minutes=61)
        assert second["expires_at"].startswith("2300"), "it is pinned"
        assert (await client.get("/api/version")).json()["version"]
        assert (await client.head("/api/tags")).status_code == 200


@pytest.mark.parametrize(
    ("does", "size"),
    [
        ({"takes": 0}, 0),
        ({"takes": 7}, 7),
        ({"takes": 149}, 149),
        ({"takes": 151}, 151),
        ({"takes": 1 << 40}, 1 << 40),
        ({"ps_status": 503}, 150),
        ({"stops": "ready"}, 150),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
async def test_a_models_size_is_what_its_process_takes_now(
    several: Make, does: dict[str, Any], size: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "QUESTION_TIMEOUT_S", 2.0)  # only one that hangs takes so long
    models = several(does={"a": does}, models={"pinned": ["a"]})
    models.needs["a"] = replace(NEEDS, on_gpu=on_gpu)
    async with served(models) as (_, client):
        await eventually(lambda: models.model("a").loaded)
        (listed,) = await loaded(client)
        sizes = listed["size"], listed["size_vram"], listed["size_max"]
        assert sizes == (size, size if on_gpu else 0, 150)
        if "stops" in does:
            os.kill(models.pid("a"), signal.SIGKILL)


async def test_the_memory_of_models_is_asked_for_with_the_clients_key(several: Make) -> None:
    key = "a-key-of-sixteen-characters"
    models = several(does={"a": {"key": key}}, settings={"access": {"api_keys": [key]}})
    async with served(models) as (_, client):
        client.headers["authorization"] = f"Bearer {key}"
        await client.post(CHAT, json={"model": "a", "messages": TALK, "stream": False})
        assert [listed["size"] for listed in await loaded(client)] == [7]


async def test_a_model_is_shown_without_being_loaded(several: Make) -> None:
    models = several()
    models.needs["c"] = LoadError("it is broken")
    async with served(models) as (_, client):
        body = {"model": "a", "name": "nobody"}  # the newer name of the field counts
        shown = (await client.post("/api/show", json=body)).json()
        assert shown["model_info"]["qwen3.context_length"] == 64
        assert (shown["capabilities"], shown["template"]) == (
            ["completion", "tools"],
            "the template",
        )
        assert not models.model("a").loaded
        for name in ("c", "c", "nobody"):
            answer = await client.post("/api/show", json={"model": name})
            assert (answer.status_code, answer.json()) == (
                404,
                {"error": f"model '{name}' not found"},
            )
        assert (await client.post("/api/show", json={"model": 3})).status_code == 400


async def test_a_request_without_text_that_cannot_be_read_is_refused(several: Make) -> None:
    async with served(several()) as (_, client):
        for path, status in ((CHAT, 400), ("/api/embed", 200)):
            body = {"model": "a", "keep_alive": 0, "messages": 3, "input": "x"}
            assert (await client.post(path, json=body)).status_code == status
        body = {"model": "a", "input": "x", "stream": True}
        assert (await client.post("/api/embed", json=body)).status_code == 200


async def test_a_client_says_how_long_a_model_stays(several: Make) -> None:
    async with served(several(models={"keep_alive_s": 60})) as (models, client):
        for kept, seconds in ((None, 60), ("10m", 600), (5, 5), (True, 60)):
            body = {"model": "a", "messages": TALK, "stream": False, "keep_alive": kept}
            await client.post(CHAT, json=body)
            assert models.models.kept_for_s(models.model("a")) == seconds
        await client.post(CHAT, json={"model": "a", "messages": TALK, "keep_alive": -1})
        assert models.models.kept_for_s(models.model("a")) is None
        body = {"model": "a", "messages": TALK, "stream": False, "keep_alive": 0}
        await client.post(CHAT, json=body)
        await eventually(lambda: not models.model("a").loaded)


@pytest.mark.parametrize(("path", "nothing"), [(CHAT, {"messages": []}), (GENERATE, {})])
async def test_a_request_without_text_unloads_a_model_and_never_loads_it_for_that(
    several: Make, path: str, nothing: dict[str, Any]
) -> None:
    async with served(several()) as (models, client):
        for _ in range(2):
            answer = await client.post(path, json={"model": "a", "keep_alive": 0} | nothing)
            assert (answer.json()["model"], answer.json()["done_reason"]) == ("a", "unload")
            assert models.model("a").loads == 0
        await client.post(path, json={"model": "a", "stream": False} | nothing)
        assert models.model("a").loaded
        await client.post(path, json={"model": "a", "keep_alive": 0} | nothing)
        assert not models.model("a").loaded
        refused = await client.post(path, json={"model": "a", "keep_alive": 0, "messages": 3})
        assert refused.status_code == 400 if path == CHAT else refused.status_code == 200


async def test_a_stream_begins_at_once_and_every_line_is_json(several: Make) -> None:
    models = several(does={"a": {"load_s": 0.4}}, settings={"server": {"sse_ping_s": 0.05}})
    async with served(models) as (_, client):
        answer = await client.post(CHAT, json={"model": "a", "messages": TALK, "die_after": 0})
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [from_json(line) for line in answer.text.splitlines()]
        assert lines[0]["message"] == {"role": "assistant", "content": ""}
        assert len(lines) > 3
        assert lines[-1] == {"error": lines[-1]["error"], "retry_after_s": 1}
        assert "has ended" in lines[-1]["error"]


@pytest.mark.parametrize("agents", [("a", "b"), ("", "x"), ("x", ""), ("a/1", "a/2"), ("é", "e")])
async def test_a_client_is_the_same_whatever_program_it_says_to_be(
    several: Make, agents: tuple[str, str]
) -> None:
    async with served(several()) as (models, client):
        for agent, kept in zip(agents, (-1, "5m"), strict=True):
            body = {"model": "a", "messages": TALK, "stream": False, "keep_alive": kept}
            await client.post(CHAT, json=body, headers=[(b"user-agent", agent.encode())])
        assert models.models.kept_for_s(models.model("a")) == 300


async def test_a_model_that_is_in_use_is_not_unloaded(several: Make) -> None:
    async with served(several()) as (models, client):
        await client.post(CHAT, json={"model": "a", "messages": TALK, "stream": False})
        async with models.models.use(models.model("a"), b"somebody"):
            answer = await client.post(GENERATE, json={"model": "a", "keep_alive": 0})
            assert answer.json()["done_reason"] == "load"
        models.clock.now += 1
        assert models.model("a").loaded
