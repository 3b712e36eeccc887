"""The time of a request, by a clock that the test moves."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from server.config import Config
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    Connection,
    Engine,
    chat,
    eventually,
    make_service,
    prompt,
    running,
    start_engine,
)
from tests.simulation.runner import Clock

MAX_S = 100.0
SETTINGS = {"limits": {"max_request_s": MAX_S}, "server": {"sse_ping_s": 0.01}}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@asynccontextmanager
async def timed(
    tokenizer: Tokenizer, **changes: Any
) -> AsyncIterator[tuple[FastAPI, Engine, Clock]]:
    """An engine that takes a step only when it is told to."""
    engine, clock = start_engine(**changes), Clock(1000.0)
    engine.gate.closed = True
    service = make_service(engine.client, tokenizer, Config.model_validate(SETTINGS))
    async with running(replace(service, clock=clock)) as app:
        try:
            yield app, engine, clock
        finally:
            engine.gate.open()
    engine.stop()


def ending_of(path: str, body: bytes, stream: bool) -> Any:
    """How the answer says that it ended."""
    if not stream:
        answer = json.loads(body)
    else:
        blocks = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        chunks = [json.loads(block) for block in blocks]
        if path == RESPONSES:
            answer = chunks[-1]["response"]
        elif path == MESSAGES:
            (answer,) = [one["delta"] for one in chunks if one["type"] == "message_delta"]
        else:
            answer = chunks[-1]
    if path == RESPONSES:
        return answer["status"], answer["incomplete_details"]["reason"]
    return answer["stop_reason"] if path == MESSAGES else answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, chat(), "length"),
        (COMPLETIONS, prompt(max_tokens=200), "length"),
        (RESPONSES, {"input": "a"}, ("incomplete", "max_output_tokens")),
        (MESSAGES, chat(max_tokens=300), "max_tokens"),
    ],
)
@pytest.mark.parametrize("steps", [0, 6])
async def test_threat_14_an_answer_ends_honestly_when_its_time_is_over(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], expected: Any, stream: bool, steps: int
) -> None:
    async with timed(tokenizer, max_num_seqs=1) as (app, engine, clock):
        connection = Connection(app, path, body | {"stream": stream})
        await eventually(lambda: engine.client.in_flight == 1)
        for _ in range(steps):
            await engine.step()
        clock.now += MAX_S - 1
        assert not connection.done
        clock.now += 1
        await connection.end()
        assert connection.status == 200
        assert ending_of(path, connection.body, stream) == expected
        engine.gate.open()
        await eventually(lambda: engine.client.in_flight == 0)
        assert engine.client.stats.generated_tokens <= steps + 1


async def test_threat_14_waiting_for_a_place_counts(tokenizer: Tokenizer) -> None:
    async with timed(tokenizer, max_num_seqs=1) as (app, engine, clock):
        first = Connection(app, CHAT, chat())
        await eventually(lambda: engine.client.in_flight == 1)
        second = Connection(app, CHAT, chat(stream=True, stream_options={"include_usage": True}))
        await eventually(lambda: engine.client.in_flight == 2)
        clock.now += MAX_S
        await second.end()
        await first.end()
        assert b'"finish_reason":"length"' in second.body
        assert b'"completion_tokens":0' in second.body
        assert second.body.endswith(b"data: [DONE]\n\n")


async def test_threat_14_what_says_nothing_of_its_length_is_bounded(tokenizer: Tokenizer) -> None:
    async with timed(tokenizer) as (app, engine, _):
        engine.gate.open()
        connection = Connection(app, CHAT, chat(ignore_eos=True))
        await connection.end()
        usage = json.loads(connection.body)["usage"]
        assert usage["total_tokens"] == engine.client.limits.max_model_len


async def test_all_answers_of_a_request_end_together(tokenizer: Tokenizer) -> None:
    async with timed(tokenizer) as (app, engine, clock):
        connection = Connection(app, CHAT, chat(n=3))
        await eventually(lambda: engine.client.in_flight == 3)
        for _ in range(4):
            await engine.step()
        clock.now += MAX_S
        await connection.end()
        choices = json.loads(connection.body)["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 3


async def test_a_prompt_that_was_not_read_in_time_has_no_probabilities(
    tokenizer: Tokenizer,
) -> None:
    async with timed(tokenizer) as (app, engine, clock):
        connection = Connection(app, COMPLETIONS, prompt("x" * 300, echo=True, logprobs=1))
        await eventually(lambda: engine.client.in_flight == 1)
        clock.now += MAX_S
        await connection.end()
        assert connection.status == 500
        assert b"the time of the request was over" in connection.body


async def test_vectors_that_are_not_made_in_time_are_refused(tokenizer: Tokenizer) -> None:
    async with timed(tokenizer, pools=True) as (app, engine, clock):
        assert engine.client.limits.embedding_size == VOCAB
        connection = Connection(app, "/v1/embeddings", {"input": ["a", "b"]})
        await eventually(lambda: engine.client.in_flight == 2)
        clock.now += MAX_S
        await connection.end()
        assert connection.status == 503
        assert json.loads(connection.body)["error"]["code"] == "request_time_over"
