"""Answers of the whole front that are lost with their replica."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from pydantic_core import from_json

from server.protocol.wire_errors import RETRY_AFTER_S, SHUTTING_DOWN
from server.ray.remote_engine import RemoteEngine
from server.text.tokenizer import Tokenizer
from tests.server.harness import serving
from tests.server.ray.local_replicas import LocalReplicas

TURNS = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 50, "ignore_eos": True},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 50},
    "/v1/messages": {"messages": TURNS, "max_tokens": 50},
    "/api/chat": {"messages": TURNS},
    "/api/generate": {"prompt": "Hello"},
}


@asynccontextmanager
async def front(replicas: LocalReplicas, tokenizer: Tokenizer) -> AsyncIterator[httpx2.AsyncClient]:
    engine = RemoteEngine(replicas, report_period_s=0.05)
    await engine.ready()
    try:
        async with serving(engine, tokenizer) as (_, client):  # type: ignore[arg-type]
            yield client
    finally:
        engine.end_all(SHUTTING_DOWN)
        replicas.stop()


def last_object(text: str) -> dict[str, Any]:
    """Of a stream, whatever frames its objects."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    found: dict[str, Any] = from_json([line for line in lines if line.startswith("{")][-1])
    return found


def error_of(path: str, last: dict[str, Any]) -> dict[str, Any]:
    """Where an API has what is said of an error."""
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        found = last["response"]["error"]
    else:
        found = last if path.startswith("/api/") else last["error"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_answer_that_is_lost_says_in_a_field_when_to_ask_again(
    path: str, tokenizer: Tokenizer
) -> None:
    replicas = LocalReplicas(2)
    replicas.dies_after = 2
    async with front(replicas, tokenizer) as client:
        answer = await client.post(path, json={"model": "recall", "stream": True} | REQUESTS[path])
        assert answer.status_code == 200
        assert "retry-after" not in answer.headers
        error = error_of(path, last_object(answer.text))
        assert error["retry_after_s"] == RETRY_AFTER_S
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_answer_that_is_not_streamed_says_it_in_the_header_alone(
    path: str, tokenizer: Tokenizer
) -> None:
    replicas = LocalReplicas(1)
    replicas.dies_after = 2
    async with front(replicas, tokenizer) as client:
        answer = await client.post(path, json={"model": "recall", "stream": False} | REQUESTS[path])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, str(RETRY_AFTER_S))
        assert "retry_after_s" not in answer.text
