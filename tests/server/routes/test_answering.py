"""Clients that go away, stop reading, or wait for long."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic_core import to_json

from server.config import Config, ServerSection
from server.routes.answering import PIECE_BYTES, json_pieces, json_response
from server.text.tokenizer import Tokenizer
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    DEADLINE_S,
    Connection,
    Engine,
    chat,
    eventually,
    ids_of,
    prompt,
    recalled_text,
    serving,
    start_engine,
    token_id,
)

OTHERS = ("abc", "abd", "#abc")
LONG = "x" * 300  # several chunks of a prompt


@asynccontextmanager
async def held(
    tokenizer: Tokenizer, *, ping_s: float = DEADLINE_S, **changes: Any
) -> AsyncIterator[tuple[FastAPI, Engine]]:
    """An application whose engine takes a step only when it is told to."""
    engine = start_engine(**changes)
    engine.gate.closed = True
    engine.gate.entered = 0
    config = Config(server=ServerSection(sse_ping_s=ping_s))
    async with serving(engine.client, tokenizer, config) as (app, _):
        try:
            yield app, engine
        finally:
            engine.gate.open()
    engine.stop()


async def expect_no_work(engine: Engine, steps: int) -> None:
    """All memory is free although the engine has begun no more steps than that."""

    def ended() -> bool:
        stats = engine.client.stats
        # Events go out before a step's snapshot is made: an older one says nothing.
        if engine.client.in_flight or stats.steps < steps or stats.running or stats.waiting:
            return False
        kv = stats.kv
        return kv is not None and kv.live_bytes == 0 and kv.free_bytes == kv.capacity_bytes

    await eventually(ended)
    assert engine.gate.entered == steps


# --- clients that go away --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "steps"),
    [
        (CHAT, chat(stream=True), 1),
        (CHAT, chat(stream=True), 5),
        (CHAT, chat(), 5),
        (COMPLETIONS, prompt(stream=True, max_tokens=-1), 5),
        (COMPLETIONS, prompt(max_tokens=-1), 5),
        (COMPLETIONS, prompt(LONG, stream=True), 2),
        (COMPLETIONS, prompt(LONG), 2),
        (CHAT, chat(n=3, stream=True), 5),
        (CHAT, chat(n=3), 5),
        (COMPLETIONS, prompt(n=3, stream=True, max_tokens=-1), 5),
    ],
    ids=lambda value: "stream" if "'stream': True" in str(value) else None,
)
async def test_fault_05_a_client_that_goes_away_frees_its_blocks_within_one_step(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], steps: int
) -> None:
    async with held(tokenizer) as (app, engine):
        connection = Connection(app, path, body)
        await eventually(lambda: engine.gate.entered == 1)
        for _ in range(steps - 1):
            await engine.step()
        connection.leave()
        await connection.end()
        engine.gate.allow(1)  # the step that runs already; there is never another one
        await expect_no_work(engine, steps)
        assert connection.status == (200 if body.get("stream") else 499)


@pytest.mark.parametrize("stream", [True, False])
async def test_fault_05_a_client_that_goes_away_while_it_waits_is_never_computed(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async with held(tokenizer, max_num_seqs=1) as (app, engine):
        first = Connection(app, CHAT, chat(max_tokens=3))
        await eventually(lambda: engine.gate.entered == 1)
        second = Connection(app, CHAT, chat(stream=stream))
        await eventually(lambda: engine.client.in_flight == 2)
        second.leave()
        await second.end()
        engine.gate.open()
        await first.end()
        assert first.status == 200
        usage = json.loads(first.body)["usage"]
        await eventually(lambda: engine.client.in_flight == 0)
        await eventually(lambda: engine.client.stats.generated_tokens == 3)
        assert engine.client.stats.prompt_tokens == usage["prompt_tokens"]


async def test_bytes_after_the_request_are_not_taken_for_a_client_that_leaves(
    tokenizer: Tokenizer,
) -> None:
    async with held(tokenizer) as (app, engine):
        connection = Connection(app, CHAT, chat(max_tokens=3))
        await eventually(lambda: engine.gate.entered == 1)
        connection.send_more(b"and another thing")
        await engine.step()
        engine.gate.open()
        await connection.end()
        assert connection.status == 200


# --- clients that do not read ----------------------------------------------------------------


async def test_a_reader_that_never_comes_back_loses_its_request(tokenizer: Tokenizer) -> None:
    async with held(tokenizer, max_backlog=8) as (app, engine):
        connection = Connection(app, CHAT, chat(stream=True))
        await connection.begins()
        connection.stop_reading()
        await eventually(lambda: engine.gate.entered == 1)
        while engine.client.in_flight:
            # The engine cannot run ahead of this loop, which has to deliver what it says.
            entered = engine.gate.entered
            engine.gate.allow(1)
            await eventually(
                lambda: engine.client.in_flight == 0 or engine.gate.entered > entered  # noqa: B023
            )
        assert not connection.done
        assert engine.gate.entered < 20
        assert len(connection.sent) < 20
        connection.read_on()
        await connection.end()
        last = connection.body.decode().split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert b"[DONE]" not in connection.body


# --- faults of the engine --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_fault_07_logits_that_are_not_numbers_fail_their_own_request_only(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async with held(tokenizer, non_finite=token_id(tokenizer, "#")) as (app, engine):
        broken = Connection(app, COMPLETIONS, prompt("abc#", stream=stream))
        others = [Connection(app, COMPLETIONS, prompt(text, max_tokens=20)) for text in OTHERS]
        await eventually(lambda: engine.client.in_flight == 1 + len(OTHERS))
        engine.gate.open()
        for connection in (broken, *others):
            await connection.end()
        for text, connection in zip(OTHERS, others, strict=True):
            (choice,) = json.loads(connection.body)["choices"]
            ids = tuple(ids_of(tokenizer, text))
            assert choice["text"] == recalled_text(tokenizer, ids, 20)
        if stream:
            *_, last, _ = broken.body.decode().split("\n\n")
            assert b"[DONE]" not in broken.body
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert broken.status == 500
            error = json.loads(broken.body)["error"]
        assert error["type"] == "server_error"
        assert "not finite" in error["message"]
        await eventually(lambda: engine.client.stats.failed_rows == 1)
        assert engine.client.alive


# --- a real socket ---------------------------------------------------------------------------


def long_answer(rng: Random) -> Any:
    tokens = [{"token": "é\ud83d\ude00"[:1], "bytes": [1, 2], "top": [{"a": 1.5}]}] * 3000
    vectors = [[rng.random() for _ in range(5000)] for _ in range(3)]
    return {"object": "list", "": None, "choices": [{"logprobs": tokens}], "data": vectors}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        {"a": [], "b": {}, 'c"\n': [{}, [], [[]]]},
        list(range(10_000)),
        ["é"] * 4097,
        [[]] * 17,
        [{"a": [0] * 5000}] * 20,
        long_answer(Random(1)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_pieces_are_the_same_json(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == to_json(value)
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


async def test_others_run_while_an_answer_is_written() -> None:
    beats, answer = 0, {"data": [long_answer(Random(2))] * 20}
    writing = asyncio.ensure_future(json_response(json_pieces(answer)))
    while not writing.done():
        await asyncio.sleep(0)
        beats += 1
    response = await writing
    assert json.loads(bytes(response.body))["data"][0]["object"] == "list"
    assert response.headers["content-length"] == str(len(response.body))
    assert beats > len(response.body) / PIECE_BYTES / 2
