"""The load client against a small server in the same program, which answers as the test says."""

import asyncio
import json
import logging
import math
import time
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from tests.bench import load
from tests.bench.load import (
    Answer,
    Exchange,
    Load,
    LoadResult,
    Target,
    gaps,
    make_prompt,
    run_load,
    send,
    start,
    together_per_s,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TEXT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = HEAD + TEXT + TEXT + FINISH + USAGE + DONE

Script = Callable[[Reader, Writer], Awaitable[None]]


@dataclass
class SmallServer:
    """Reads a request, then does what the script says; the connection ends with it."""

    script: Script
    heads: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        self.idle.clear()
        with suppress(ConnectionError):  # the client has left
            await self._answer(reader, writer)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()
        self.connections -= 1
        if self.connections == 0:
            self.idle.set()

    async def _answer(self, reader: Reader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        await self.script(reader, writer)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[SmallServer, Target]]:
    small = SmallServer(script)
    server = await asyncio.start_server(small.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield small, Target.of(f"http://127.0.0.1:{port}/v1", "some-model")
        await small.idle.wait()  # no connection outlives its test


def says(*parts: bytes) -> Script:
    async def script(reader: Reader, writer: Writer) -> None:
        for part in parts:
            writer.write(part)
        await writer.drain()

    return script


async def never(reader: Reader, writer: Writer) -> None:
    """Says nothing until the client has left."""
    await reader.read()


def a_load(streams: int = 1, requests: int = 1, time_limit_s: float = 30.0) -> Load:
    return Load(streams, requests, 40, 5, 7, time_limit_s)


def an_answer(started_s: float, *text_times_s: float, tokens: int = 0) -> Answer:
    ended_s = max((started_s, *text_times_s)) + 1
    return Answer(started_s, ended_s, text_times_s, 9, tokens, "length", None)


# --- targets and prompts -----------------------------------------------------------------------


def test_a_target_is_what_an_sdk_is_given() -> None:
    assert Target.of("http://127.0.0.1:80/v1/", "m") == Target("127.0.0.1", 80, "/v1", "m")
    assert Target.of("http://localhost", "m") == Target("localhost", 80, "", "m")
    for wrong in ("https://127.0.0.1/v1", "127.0.0.1:80", "http://"):
        with pytest.raises(ValueError, match="plain http only"):
            Target.of(wrong, "m")


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    prompts = [make_prompt(seed, index, 86) for seed in range(8) for index in range(8)]
    assert {len(prompt) for prompt in prompts} == {86}
    assert len({prompt[:7] for prompt in prompts}) == 64
    assert make_prompt(3, 4, 86) == make_prompt(3, 4, 86)
    for prompt in prompts:
        assert all(word.isascii() and word.islower() for word in prompt.split(" "))


# --- figures -----------------------------------------------------------------------------------


def test_times_are_counted_from_the_start_and_between_texts() -> None:
    answer = an_answer(10.0, 12.0, 12.5, 14.0)
    assert answer.ttft_s == 2.0
    assert answer.gaps_s == [0.5, 1.5]
    assert an_answer(10.0).ttft_s is None
    assert an_answer(10.0).gaps_s == an_answer(10.0, 11.0).gaps_s == gaps([]) == []


def test_a_result_is_of_all_answers_together() -> None:
    answers = [an_answer(10.0, 12.0, 13.0, tokens=30), an_answer(11.0, 19.0, tokens=20)]
    result = LoadResult([*answers, an_answer(12.0)], client_cpu_s=2.5)
    assert result.seconds == 10.0
    assert result.tokens_per_s == 5.0
    assert result.client_share == 0.25
    assert result.ttfts_s == [2.0, 8.0]
    assert result.gaps_s == [1.0]
    assert result.errors == []


def test_streams_decode_together_from_the_last_first_text_to_the_first_last_one() -> None:
    early = an_answer(0, 1, 2, 3, 4, 5, tokens=5)
    late = an_answer(0, 3, 4, 5, 6, 7, tokens=9)
    assert together_per_s([early]) == early.decode_per_s == 1.0
    assert together_per_s([early, late]) == 1.0 + 2.0, "a text of the second one is two tokens"
    assert LoadResult([early, late], 0.1).decode_per_s == 3.0


def test_streams_that_do_not_decode_together_have_no_rate() -> None:
    first, second = an_answer(0, 1, 2, tokens=2), an_answer(0, 2, 3, tokens=2)
    assert math.isnan(together_per_s([first, second]))
    assert math.isnan(together_per_s([first, an_answer(0, 1, tokens=2)]))
    assert math.isnan(together_per_s([first, an_answer(0, 1, 2)]))


def test_without_usage_nothing_is_counted() -> None:
    counted, silent = an_answer(10.0, 12.0, 14.0, tokens=9), an_answer(10.0, 12.0, 14.0)
    assert counted.decode_per_s == 4.0, "the first token is not decoded"
    assert math.isnan(silent.decode_per_s)
    assert math.isnan(an_answer(10.0, 12.0, tokens=9).decode_per_s)
    assert math.isnan(LoadResult([counted, silent], 0.0).tokens_per_s)
    assert LoadResult([counted], 0.0).tokens_per_s == pytest.approx(9 / 5)


async def test_times_are_those_of_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    exchange = Exchange(b"", 50.0)
    for read in (HEAD, TEXT, TEXT + TEXT, USAGE + DONE):  # at 100, 101, 102 and 103
        exchange.data_received(read)
    exchange.connection_lost(None)
    answer = await exchange.answer(1.0)
    assert answer.text_times_s == (101.0, 102.0)
    assert (answer.ttft_s, answer.gaps_s, answer.ended_s) == (51.0, [1.0], 104.0)


# --- loads -------------------------------------------------------------------------------------


async def test_every_request_is_sent_once_and_counted() -> None:
    async with serving(says(WHOLE)) as (server, target):
        result = await run_load(target, a_load(streams=3, requests=10))
    assert result.errors == []
    assert [(a.prompt_tokens, a.completion_tokens) for a in result.answers] == [(9, 5)] * 10
    assert {answer.finish for answer in result.answers} == {"length"}
    assert result.tokens_per_s == pytest.approx(50 / result.seconds)
    assert len(result.ttfts_s) == 10
    for answer in result.answers:
        assert answer.started_s < answer.text_times_s[0] <= answer.ended_s
    prompts = sorted(body["messages"][0]["content"] for body in server.bodies)
    assert prompts == sorted(make_prompt(7, index, 40) for index in range(10))


async def test_a_request_is_what_openai_documents() -> None:
    async with serving(says(WHOLE)) as (server, target):
        await run_load(target, a_load())
    lines = server.heads[0].split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions HTTP/1.1"
    assert f"Host: 127.0.0.1:{target.port}".encode() in lines
    assert server.bodies[0] == {
        "model": "some-model",
        "messages": [{"role": "user", "content": make_prompt(7, 0, 40)}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_text_or_ids_can_be_continued_and_cached_tokens_are_told() -> None:
    usage = b'data: {"usage":{"completion_tokens":5,"prompt_tokens":9,"cached_tokens":8}}\n\n'
    async with serving(says(HEAD + TEXT + FINISH + usage + DONE)) as (server, target):
        for prompt in ("some text", [5, 6]):
            exchange = await send(target, target.completion(prompt, 5))
            answer = await exchange.answer(10.0)
            assert (answer.error, answer.cached_tokens) == (None, 8)
    assert server.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert [body["prompt"] for body in server.bodies] == ["some text", [5, 6]]
    assert {body["max_tokens"] for body in server.bodies} == {5}


async def test_streams_ask_side_by_side_and_each_one_thing_at_a_time() -> None:
    all_here = asyncio.Barrier(4)

    async def script(reader: Reader, writer: Writer) -> None:
        await all_here.wait()  # ends only if as many requests as streams are here at once
        await says(WHOLE)(reader, writer)

    async with serving(script) as (_, target):
        result = await run_load(target, a_load(streams=4, requests=12))
    assert result.errors == []
    assert len(result.answers) == 12
    times = [(answer.started_s, answer.ended_s) for answer in result.answers]
    together = [sum(start <= now < end for start, end in times) for now, _ in times]
    assert max(together) == 4


async def test_texts_that_arrive_apart_have_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = asyncio.Queue[None]()
    receive = Exchange.data_received

    def note(self: Exchange, data: bytes) -> None:
        receive(self, data)
        taken.put_nowait(None)

    async def script(reader: Reader, writer: Writer) -> None:
        for part in (HEAD, TEXT, TEXT, TEXT, USAGE + DONE):
            writer.write(part)
            await taken.get()

    monkeypatch.setattr(Exchange, "data_received", note)
    async with serving(script) as (_, target):
        result = await run_load(target, a_load())
    assert result.errors == []
    assert len(result.gaps_s) == 2
    assert all(gap > 0 for gap in result.gaps_s)


async def test_an_answer_that_is_whole_ends_though_the_server_stays() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await says(WHOLE)(reader, writer)
        await never(reader, writer)

    async with serving(script) as (_, target):
        result = await run_load(target, a_load(requests=2))
    assert result.errors == []
    assert len(result.answers) == 2


# --- what goes wrong ---------------------------------------------------------------------------

BROKEN = {
    "nothing at all": (b"", "no answer"),
    "half a head": (HEAD[:20], "no answer"),
    "a head and no answer": (HEAD, "the answer broke off"),
    "an answer without an end": (HEAD + TEXT + FINISH + USAGE, "the answer broke off"),
    "half an end": (WHOLE[:-1], "the answer broke off"),
    "a refusal": (b"HTTP/1.1 429 Busy\r\n\r\nlater", "status 429: later"),
    "an error event": (HEAD + TEXT + b'data: {"error":"oh"}\n\n' + DONE, 'data: {"error":"oh"}'),
}


@pytest.mark.parametrize(("wire", "error"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_answer_is_an_error_and_the_load_goes_on(wire: bytes, error: str) -> None:
    turns = count()

    async def script(reader: Reader, writer: Writer) -> None:
        await says(wire if next(turns) == 1 else WHOLE)(reader, writer)

    async with serving(script) as (_, target):
        result = await run_load(target, a_load(requests=3))
    assert [answer.error is None for answer in result.answers] == [True, False, True]
    assert error in result.errors[0]


@pytest.mark.parametrize(
    "wire",
    [
        b"GARBAGE\r\n\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nsize\r\n",
    ],
)
async def test_what_is_no_http_is_an_error(wire: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(says(wire)) as (_, target):
        result = await run_load(target, a_load())
    assert result.errors[0].startswith("no HTTP: ")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR], "nothing was raised"


async def test_a_reset_connection_is_an_error() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await says(HEAD + TEXT)(reader, writer)
        writer.transport.abort()

    async with serving(script) as (_, target):
        result = await run_load(target, a_load())
    assert result.errors in (["the answer broke off"], ["no answer"])


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GRACE_S", 0.05)


@pytest.mark.usefixtures("no_grace")
async def test_an_answer_that_does_not_come_is_given_up_when_the_time_is_over() -> None:
    async with serving(never) as (_, target):
        began_s = time.perf_counter()
        result = await run_load(target, a_load(streams=2, requests=50, time_limit_s=1.0))
    assert len(result.answers) == 2, "no request begins after the limit"
    for answer in result.answers:
        assert answer.error is not None
        assert answer.error.startswith("no end within ")
        assert answer.ended_s >= began_s + 1.0


@pytest.mark.usefixtures("no_grace")
async def test_an_answer_that_stalls_keeps_what_it_has_given() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await says(HEAD + TEXT)(reader, writer)
        await never(reader, writer)

    async with serving(script) as (_, target):
        result = await run_load(target, a_load(time_limit_s=1.0))
    (error,) = result.errors
    assert error.startswith("no end within ")
    assert len(result.ttfts_s) == 1


async def test_leaving_ends_the_exchange() -> None:
    asked = asyncio.Event()

    async def script(reader: Reader, writer: Writer) -> None:
        asked.set()
        await never(reader, writer)

    async with serving(script) as (_, target):
        exchange = await start(target, "hello", 5)
        await asked.wait()
        exchange.abort()
        answer = await exchange.answer(30.0)
    assert answer.error == "no answer"


async def test_nobody_who_listens_is_an_os_error() -> None:
    async with serving(says(WHOLE)) as (_, target):
        await run_load(target, a_load())
    with pytest.raises(OSError, match=str(target.port)):
        await run_load(target, a_load())
