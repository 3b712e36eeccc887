"""Ollama's API over HTTP."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx2
import pytest

from engine.types import Request
from server.config import Config, ImagesSection
from server.protocol.ollama.answer import API_VERSION
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    MODEL,
    Engine,
    Json,
    engine_fixture,
    own_engine,
    posted,
    serving,
    told,
)

OLLAMA_CHAT, GENERATE = "/api/chat", "/api/generate"
MAX_LEN = 1000
MAX_MESSAGES = 20


def chat(content: str = "Hello", **fields: Any) -> Json:
    """A greedy request of one message."""
    asked = {"messages": [{"role": "user", "content": content}]}
    options = {"temperature": 0, "num_predict": 300} | fields.pop("options", {})
    return asked | fields | {"options": options}


# With room for tools in its prompts.
engine = engine_fixture(max_model_len=MAX_LEN)


@pytest.fixture
async def http(engine: Engine, tokenizer: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    async with told(engine, tokenizer, max_messages=MAX_MESSAGES) as client:
        yield client


async def refused(http: httpx2.AsyncClient, path: str, body: Any) -> str:
    """What a 400 says."""
    error = await posted(http, path, body, status=400)
    assert error.keys() == {"error"}
    said: str = error["error"]
    return said


# --- what there is ---------------------------------------------------------------------------


async def test_who_looks_for_a_model_finds_what_it_can_do(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/api/version")).json() == {"version": API_VERSION}
    (listed,) = (await http.get("/api/tags")).json()["models"]
    assert (listed["name"], listed["model"]) == (MODEL, MODEL)
    assert len(listed["digest"]) == 64
    shown = (await http.post("/api/show", json={"model": MODEL})).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == MAX_LEN
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "im_start" in shown["template"]
    (there,) = (await http.get("/api/ps")).json()["models"]
    assert there["context_length"] == MAX_LEN
    assert 0 < there["size"] < there["size_max"]
    assert datetime.fromisoformat(there["expires_at"]).year == 2300
    for path in ("/api/version", "/api/tags", "/api/ps"):
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    "body",
    [{}, {"name": MODEL}, {"model": f"{MODEL}:latest"}, {"model": MODEL, "name": "nobody"}],
)
async def test_a_model_is_shown_by_all_of_its_names(http: httpx2.AsyncClient, body: Json) -> None:
    response = await http.post("/api/show", json=body)
    assert (response.status_code, response.json()["details"]["format"]) == (200, "safetensors")


async def test_what_ollama_has_beside_answers_is_not_there(http: httpx2.AsyncClient) -> None:
    for method, path, text in (
        ("POST", "pull", "quire downloads no model on request: run `quire pull NAME` on"),
        ("DELETE", "delete", "quire removes no model on request: run `quire rm NAME` on"),
        ("POST", "copy", "quire copies no models: its setting models.aliases gives them more"),
        *(
            ("POST", path, "There is nothing")
            for path in ("push", "create", "blobs/sha256:0", "no")
        ),
    ):
        response = await http.request(method, f"/api/{path}", json={})
        assert response.status_code == 404
        assert response.json()["error"].startswith(text)
    for path in ("speech", "transcriptions", "translations"):
        error = (await http.post(f"/v1/audio/{path}", json={})).json()["error"]
        assert error["message"].startswith(
            "quire reads and writes text: have your client use anoth"
        )
    response = await http.get(OLLAMA_CHAT)
    assert (response.status_code, list(response.json())) == (405, ["error"])


# --- answers ---------------------------------------------------------------------------------


async def test_no_length_and_no_seed_are_what_ollama_means_by_them(
    http: httpx2.AsyncClient, submitted: list[Request]
) -> None:
    for length in (0, -1, -2, None):
        body = chat(think=False, options={"num_predict": length, "seed": -1, "stop": "e"})
        await http.post(OLLAMA_CHAT, json=body)
    (room,) = {len(one.prompt_ids) + one.params[0].max_tokens for one in submitted}
    assert room == MAX_LEN
    assert len({one.params[0].seed for one in submitted}) == 4


@pytest.mark.parametrize("path", [OLLAMA_CHAT, GENERATE])
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), (0, "unload"), ("0s", "unload"), ("10m", "load"), (-1, "load")],
)
async def test_who_asks_nothing_is_told_at_once_that_the_model_is_there(
    http: httpx2.AsyncClient, submitted: list[Request], path: str, keep_alive: Any, reason: str
) -> None:
    body = {"model": MODEL, "keep_alive": keep_alive, "messages": [], "prompt": ""}
    response = await http.post(path, json=body)
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert (found["done"], found["done_reason"]) == (True, reason)
    assert found.get("response", found.get("message", {}).get("content")) == ""
    assert not submitted


async def test_images_are_what_the_setting_says(engine: Engine, tokenizer: Tokenizer) -> None:
    config = Config(images=ImagesSection(ollama="placeholder"))
    message = {"role": "user", "content": "What?", "images": ["aGk=", "aGk="]}
    async with serving(engine.client, tokenizer, config) as (_, http):
        short = {"options": {"num_predict": 1}}
        response = await http.post(OLLAMA_CHAT, json={"messages": [message]} | short)
        assert response.headers["x-images-not-shown"] == "2"
        response = await http.post(GENERATE, json={"prompt": "What?", "images": ["aGk="]} | short)
        assert response.headers["x-images-not-shown"] == "1"


# --- streams and faults ----------------------------------------------------------------------


async def test_an_engine_that_has_ended_loads_nothing(tokenizer: Tokenizer) -> None:
    async with own_engine(tokenizer) as (engine, _, http):
        engine.stop()
        for body in ({}, chat()):
            response = await http.post(OLLAMA_CHAT, json=body)
            assert (response.status_code, list(response.json())) == (503, ["error"])
