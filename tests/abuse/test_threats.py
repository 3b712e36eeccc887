"""Threats from outside, each with what becomes of it. The numbers are those of the list of threats;
those of a single guard stand beside its other tests."""

import asyncio
import json
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from server.text.encoder import Encoder
from server.text.tokenizer import Tokenizer
from tests.abuse.clients import (
    Ending,
    chat_request,
    connected,
    crowd,
    huge_body,
    huge_head,
    never_reading,
    one_of_many,
    request,
    silent,
    slow_body,
    slow_headers,
)
from tests.abuse.servers import FEW, Abused, abused
from tests.clients.servers import QUIRE, run_to_end
from tests.server.harness import (
    CHAT,
    COMPLETIONS,
    DEADLINE_S,
    Connection,
    chat,
    eventually,
    prompt,
)

ROOT = Path(__file__).parents[2]
SETTINGS = 2
SOON_S = 0.2
LONG_S = 60.0
CLOSING = request(headers={"Connection": "close"})
MANY_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "max_tokens": -1, "n": 8}


def resident_bytes() -> int:
    """Of this process, which the server is part of."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def limits(**values: Any) -> dict[str, Any]:
    return {"limits": values}


# --- 1: bind to the world --------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_threat_01_no_other_machine_is_listened_to_without_a_key(host: str) -> None:
    command = (QUIRE, "serve", "no-such-model", "--host", host, "--port", "0")
    found = run_to_end(*command, cwd=ROOT)
    assert found.returncode == SETTINGS
    *_, line = found.stderr.splitlines()
    assert line.startswith("quire: setting server.host: ")
    assert "set access.api_keys" in line


# --- 5: clients that do not come to an end ---------------------------------------------------


async def test_threat_05_slow_headers_and_bodies_are_cut_off(tokenizer: Tokenizer) -> None:
    settings = limits(max_receive_s=SOON_S, keep_alive_s=60)
    async with abused(tokenizer, settings) as server:
        head, body, idle = await asyncio.gather(
            slow_headers(server.port, SOON_S / 20),
            slow_body(server.port, SOON_S / 20),
            silent(server.port),
        )
        assert (head.status, body.status) == (408, 408)
        assert json.loads(body.body)["error"]["code"] == "request_timeout"
        assert body.header("connection") == "close"
        assert idle.outcome == "closed"
        assert all(ending.seconds >= SOON_S * 0.9 for ending in (head, body, idle))
        assert server.refused("too_slow") == 2
        await server.is_empty()


async def test_threat_05_who_does_not_ask_keeps_nobody_out(tokenizer: Tokenizer) -> None:
    """All connections are taken by clients that never come to an end, and more of them knock all
    the time."""
    settings = limits(max_connections=16, max_receive_s=LONG_S, crowded_receive_s=SOON_S / 10)

    async def rude(ask: Callable[[], Coroutine[None, None, Ending]]) -> None:
        while True:
            with suppress(OSError):
                await ask()
            await asyncio.sleep(SOON_S / 10)

    async with abused(tokenizer, settings) as server:
        port = server.port
        kinds = (
            lambda: silent(port),
            lambda: slow_headers(port, SOON_S / 20),
            lambda: slow_body(port, SOON_S / 20),
        )
        rudes = [asyncio.ensure_future(rude(kinds[number % 3])) for number in range(48)]
        try:
            await eventually(lambda: server.refused("connections") > 0)
            for _ in range(5):
                async with asyncio.timeout(LONG_S / 2):
                    while (await one_of_many(port, CLOSING)).status != 200:
                        await asyncio.sleep(SOON_S / 20)
        finally:
            for task in rudes:
                task.cancel()
            await asyncio.gather(*rudes, return_exceptions=True)
        await server.is_empty()


async def test_threat_05_a_long_answer_is_no_slow_request(tokenizer: Tokenizer) -> None:
    # As long as a busy machine may take for what is sent at once.
    receive_s = 1.0
    async with abused(tokenizer, limits(max_receive_s=receive_s, keep_alive_s=1)) as server:
        server.engine.gate.closed = True
        async with connected(server.port) as wire:
            await wire.send(chat_request(max_tokens=2))
            await asyncio.sleep(1.5 * receive_s)
            server.engine.gate.open()
            assert b"200 OK" in await wire.read_until(b"usage")
            # The connection may be used again, and has its time again.
            wire.received = b""
            await wire.send(request())
            assert b"200 OK" in await wire.read_until(b'"ok"')
            assert (await wire.ending()).outcome == "200"


# --- 6, 7: clients that send too much --------------------------------------------------------


async def test_threat_06_a_huge_head_is_refused_and_not_kept(tokenizer: Tokenizer) -> None:
    async with abused(tokenizer) as server:
        before = resident_bytes()
        ending = await huge_head(server.port, megabytes=100)
        assert ending.was_reset or ending.status == 431
        assert server.refused("bad_http") == 1
        assert resident_bytes() - before < 32 * 2**20
        await server.is_empty()


async def test_threat_07_a_huge_body_is_refused_and_not_kept(tokenizer: Tokenizer) -> None:
    async with abused(tokenizer) as server:
        before = resident_bytes()
        ending = await huge_body(server.port, megabytes=200)
        assert ending.was_reset or ending.status == 413
        assert server.refused("too_large") == 1
        assert resident_bytes() - before < 64 * 2**20
        await server.is_empty()


async def test_threat_07_a_body_that_says_it_is_huge_is_refused_at_once(
    tokenizer: Tokenizer,
) -> None:
    async with abused(tokenizer) as server, connected(server.port) as wire:
        head = {"Content-Type": "application/json", "Expect": "100-continue"}
        await wire.send(request("POST", CHAT, head | {"Content-Length": 10**12}))
        ending = await wire.ending()
        assert ending.statuses == [413]
        assert ending.header("connection") == "close"


async def test_threat_07_a_body_that_nobody_wants_is_not_read_for_ever(
    tokenizer: Tokenizer,
) -> None:
    settings = limits(max_body_bytes=100_000)
    settings |= {"access": {"api_keys": "sk-0123456789abcdef"}}
    async with abused(tokenizer, settings) as server:
        ending = await huge_body(server.port, megabytes=200)
        assert ending.was_reset or ending.status == 401
        assert server.refused("key") == 1
        await server.is_empty()


# --- 8: hostile JSON -------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    "/chat/completions": chat(),
    COMPLETIONS: prompt(),
    "/completions": prompt(),
    "/v1/responses": {"max_output_tokens": 2, "input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": chat(max_tokens=1),
    "/v1/messages/count_tokens": {"messages": chat()["messages"]},
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"messages": chat()["messages"]},
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"model": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
# Of the field that stands last in a body.
HOSTILE = ("NaN", "Infinity", "-Infinity", "1e400", "true", "1" + "0" * 4000, '"\\ud800"', "{}")


def hostile_bodies(body: dict[str, Any]) -> list[bytes]:
    """As no JSON library would write them."""
    name = list(body)[-1]
    whole = json.dumps(body)
    start = json.dumps({key: value for key, value in body.items() if key != name})[:-1]
    start += ", " if len(body) > 1 else ""
    return [
        *(f'{start}"{name}": {value}}}'.encode() for value in HOSTILE),
        f'{start}"{name}": {"[" * 100_000}'.encode(),
        f'{start}"{name}": {"[" * 5000}{"]" * 5000}}}'.encode(),
        whole.encode().replace(b'"a"', b'"\xff"').replace(b"Hello", b"\xc3") + b"\xff",
        whole.encode("utf-16"),
        whole.encode()[:-1],
        whole.encode() + b"x",
        b"",
        b"null",
        b"[]",
        b"\x00",
    ]


def test_every_body_that_is_taken_is_tried(app: Any) -> None:
    taken = [path for path, operations in app.openapi()["paths"].items() if "post" in operations]
    assert set(taken) <= set(BODIES)


@pytest.mark.parametrize("path", BODIES)
async def test_threat_08_hostile_json_is_a_bad_request(http: Any, path: str) -> None:
    for body in hostile_bodies(BODIES[path]):
        response = await http.post(path, content=body)
        assert response.status_code == 400, body[:100]
        assert "error" in response.json()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "",
    ],
)
async def test_threat_08_what_does_not_say_that_it_is_json_is_not_read(
    http: Any, path: str, kind: str
) -> None:
    body = json.dumps(BODIES[path])
    response = await http.post(path, content=body, headers={"Content-Type": kind})
    assert response.status_code == 415
    error = response.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert "Content-Type: application/json" in said


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON;charset=utf-8", "application/vnd.x+json"]
)
async def test_json_goes_by_several_names(http: Any, kind: str) -> None:
    response = await http.post(
        "/tokenize", content='{"prompt": "a"}', headers={"Content-Type": kind}
    )
    assert response.status_code == 200


# --- 9, 10: prompts --------------------------------------------------------------------------


async def test_threat_09_a_prompt_of_a_million_tokens_is_refused_while_others_go_on(
    http: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Encoder.encode

    encoded: list[int] = []

    def counted(self: Encoder, texts: list[str], **how: Any) -> Any:
        encoded.append(sum(map(len, texts)))
        return encode(self, texts, **how)

    monkeypatch.setattr(Encoder, "encode", counted)
    stream = Connection(app, CHAT, chat(stream=True, max_tokens=-1))
    await stream.begins()
    million = [
        (COMPLETIONS, prompt("a " * 1_000_000), "context_length_exceeded"),
        (COMPLETIONS, prompt([5] * 1_000_000), "too_many_values"),
        (CHAT, chat("a " * 1_000_000), "context_length_exceeded"),
        ("/v1/responses", {"input": "a " * 1_000_000}, "context_length_exceeded"),
    ]
    for path, body, code in million:
        content = json.dumps(body)
        # What it costs the event loop; how long that takes is the machine's affair.
        started_s = time.thread_time()
        response = await http.post(path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == code
        assert time.thread_time() - started_s < 1.0
    assert sum(encoded) < len(million) * 500_000, "all of it was encoded"
    await stream.end()
    assert stream.body.endswith(b"data: [DONE]\n\n")


async def test_threat_10_while_a_text_is_encoded_the_server_goes_on(
    http: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, done = threading.Event(), threading.Event()
    encode = Encoder.encode

    def slow(self: Encoder, texts: list[str], **how: Any) -> Any:
        if texts == ["slow"]:
            encoding.set()
            assert done.wait(DEADLINE_S)
        return encode(self, texts, **how)

    monkeypatch.setattr(Encoder, "encode", slow)
    asked = asyncio.ensure_future(http.post(COMPLETIONS, json=prompt("slow", max_tokens=1)))
    await eventually(encoding.is_set)
    assert (await http.get("/health")).status_code == 200
    assert (await http.post(CHAT, json=chat(max_tokens=1))).status_code == 200
    assert not asked.done()
    done.set()
    assert (await asked).status_code == 200


# --- 11: too many ----------------------------------------------------------------------------


async def test_threat_11_of_a_crowd_everybody_gets_an_outcome(tokenizer: Tokenizer) -> None:
    # Nobody's place becomes free before all have come.
    settings = limits(max_connections=24, max_queued_requests=4, keep_alive_s=60)
    async with abused(tokenizer, settings, max_num_seqs=2, max_queue=4) as server:
        server.engine.gate.closed = True
        async with connected(server.port) as honest:
            await honest.send(chat_request(stream=True, max_tokens=20))
            await honest.read_until(b"data: ")
            size = 46
            arriving = asyncio.ensure_future(crowd(server.port, size, chat_request(max_tokens=2)))
            await eventually(lambda: server.refused("connections") == size + 1 - 24)
            await eventually(lambda: server.refused("queue_full") == 24 - 6)
            server.engine.gate.open()
            assert b"[DONE]" in await honest.read_until(b"[DONE]")
            await eventually(lambda: not server.server.server_state.tasks)
            server.server.should_exit = True  # which closes the connections
            endings = await arriving
        statuses = [ending.status for ending in endings]
        assert statuses.count(200) == 5
        assert statuses.count(429) == 18
        assert statuses.count(503) == size - 23
        for ending in endings:
            assert ending.status == 200 or ending.header("retry-after") == "1"
        await server.is_empty()


async def test_threat_11_one_key_leaves_room_for_others(tokenizer: Tokenizer) -> None:
    settings: dict[str, Any] = limits(max_key_share_ratio=0.5, max_queued_requests=6)
    keys = ["sk-0123456789abcdef", "sk-fedcba9876543210"]
    settings["access"] = {"api_keys": keys}
    async with abused(
        tokenizer, settings, max_num_seqs=2, max_queue=6, max_share_ratio=0.5
    ) as server:
        server.engine.gate.closed = True

        def asked(key: str, **fields: Any) -> Connection:
            sent = [(b"authorization", f"Bearer {key}".encode())]
            app = server.server.config.loaded_app
            return Connection(app, CHAT, chat(**fields), headers=sent)

        greedy = [asked(keys[0]) for _ in range(6)]
        await eventually(lambda: sum(one.done for one in greedy) == 2)
        for one in greedy:
            if one.done:
                assert one.status == 429
                assert json.loads(one.body)["error"]["code"] == "key_share_full"
                assert (b"retry-after", b"1") in one.sent[0]["headers"]
        assert server.refused("key_share") == 2
        assert server.engine.client.in_flight == 4
        others = [asked(keys[1], max_tokens=1) for _ in range(2)]
        await eventually(lambda: server.engine.client.in_flight == 6)
        # Places come back however requests end.
        staying = [one for one in greedy if not one.done]
        staying[0].leave()
        server.engine.gate.open()
        for one in (*staying, *others):
            await one.end()
        assert {one.status for one in (*staying[1:], *others)} == {200}
        await server.is_free()
        last = asked(keys[0], n=4, max_tokens=1)
        await last.end()
        assert last.status == 200
        too_many = asked(keys[0], n=5, max_tokens=1)
        await too_many.end()
        assert too_many.status == 400


async def test_fault_24_a_server_without_descriptors_takes_connections_again_later() -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.abuse.servers"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        assert child.stdout is not None
        port = int(await child.stdout.readline())
        async with connected(port) as first:
            held = [connected(port) for _ in range(2 * FEW)]
            wires = [await one.__aenter__() for one in held]
            await first.send(request())
            assert b"200 OK" in await first.read_until(b'"ok"')
            for wire in wires:
                wire.leave()
            async with connected(port) as late:
                await late.send(request())
                assert b"200 OK" in await late.read_until(b'"ok"')
    finally:
        child.kill()
        await child.wait()


# --- 12: readers that do not read ------------------------------------------------------------


async def test_threat_12_a_reader_that_takes_nothing_is_cut_off(tokenizer: Tokenizer) -> None:
    settings = limits(max_reader_stall_s=SOON_S)
    async with abused(tokenizer, settings, send_buffer_bytes=4096) as server:
        ending = await never_reading(server.port, **MANY_LOGPROBS)
        assert ending.was_reset
        await eventually(lambda: server.refused("slow_reader") == 1)
        await server.is_empty()


async def test_threat_12_an_answer_that_is_complete_is_not_kept_for_ever(
    tokenizer: Tokenizer,
) -> None:
    settings = limits(max_reader_stall_s=SOON_S, keep_alive_s=1)
    async with abused(tokenizer, settings, send_buffer_bytes=4096) as server:
        fields = MANY_LOGPROBS | {"max_tokens": 40}
        async with connected(server.port, small_buffer=True) as wire:
            await wire.send(chat_request(**fields))
            await eventually(lambda: server.refused("slow_reader") == 1)
            await server.is_empty()


async def test_threat_12_a_reader_that_is_only_slow_gets_its_answer(tokenizer: Tokenizer) -> None:
    settings = limits(max_reader_stall_s=2.0)
    async with abused(tokenizer, settings, send_buffer_bytes=4096) as server:
        async with connected(server.port, small_buffer=True) as wire:
            await wire.send(chat_request(stream=True, **MANY_LOGPROBS | {"max_tokens": 30}))
            await wire.read_until(b"[DONE]")
        assert server.refused("slow_reader") == 0
        await server.is_empty()


# --- 13: clients that leave ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_threat_13_a_client_that_leaves_frees_all_in_every_phase(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with abused(tokenizer, max_num_seqs=1) as server:
        engine, gate = server.engine, server.engine.gate
        whole = chat_request("x" * 300, stream=stream)
        warmed_up = gate.entered

        async def leaves(data: bytes, when: Any) -> None:
            async with connected(server.port) as wire:
                await wire.send(data)
                await eventually(when)
                wire.leave()
            await server.is_empty()

        # While it sends its body.
        await leaves(whole[:-10], lambda: server.connections == 1)
        assert gate.entered == warmed_up
        # While its prompt is encoded.
        encoding, go_on = threading.Event(), threading.Event()
        encode = Encoder.encode

        def slow(*arguments: Any, **how: Any) -> Any:
            encoding.set()
            assert go_on.wait(DEADLINE_S)
            return encode(*arguments, **how)

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode", slow)
            async with connected(server.port) as wire:
                await wire.send(whole)
                await eventually(encoding.is_set)
                wire.leave()
            await eventually(lambda: server.connections == 0)
            go_on.set()
            await server.is_empty()
        # While the first step of its prompt runs, and when it generates.
        for steps in (1, 8):
            gate.close()
            before = gate.entered
            async with connected(server.port) as wire:
                await wire.send(whole)
                await eventually(lambda: gate.entered > before)  # noqa: B023
                for _ in range(steps - 1):
                    await engine.step()
                wire.leave()
                await eventually(lambda: server.connections == 0)
                gate.open()
            await server.is_empty()
        # While it waits for a place.
        gate.close()
        async with connected(server.port) as first, connected(server.port) as second:
            await first.send(chat_request(max_tokens=3))
            await eventually(lambda: engine.client.in_flight == 1)
            await second.send(whole)
            await eventually(lambda: engine.client.in_flight == 2)
            second.leave()
            await eventually(lambda: server.connections == 1)
            gate.open()
            assert b"200 OK" in await first.read_until(b"usage")
        await server.is_empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_threat_13_who_closes_the_sending_half_has_left(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async with abused(tokenizer) as server:
        server.engine.gate.closed = True
        async with connected(server.port) as wire:
            await wire.send(chat_request(stream=stream))
            await eventually(lambda: server.engine.client.in_flight == 1)
            wire.half_close()
            await eventually(lambda: server.connections == 0)
            server.engine.gate.open()
        await server.is_empty()


async def test_threat_13_who_asks_ahead_and_leaves_has_left(tokenizer: Tokenizer) -> None:
    async with abused(tokenizer) as server:
        server.engine.gate.closed = True
        async with connected(server.port) as wire:
            await wire.send(chat_request())
            await eventually(lambda: server.engine.client.in_flight == 1)
            await wire.send(chat_request() * 3)
            await asyncio.sleep(0.05)
            wire.leave()
            await eventually(lambda: server.connections == 0)
            server.engine.gate.open()
        await server.is_empty()


# --- 19: what others made --------------------------------------------------------------------


def test_threat_19_no_code_of_models_is_run_and_all_packages_are_pinned() -> None:
    sources = [
        path.read_text()
        for folder in ("server", "engine", "kvcache", "metal_ext")
        for path in (ROOT / folder).rglob("*.py")
    ]
    banned = r"trust_remote_code\s*=\s*True|^\s*(?:import|from) (?:pickle|marshal|torch)\b|\beval\("
    for text in sources:
        # mx.eval computes arrays.
        assert not re.search(banned, text.replace("mx.eval(", ""), re.MULTILINE)
    for lock in ("requirements.lock", "requirements-dev.lock", "requirements-cluster.lock"):
        lines = (ROOT / "configs/locks" / lock).read_text().splitlines()
        packages = [line for line in lines if re.match(r"[a-z0-9]", line)]
        assert packages
        assert all(re.match(r"[\w.\[\]-]+==\S+", line) for line in packages)


# --- 22: requests in disguise ----------------------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked"
POST = "POST /health HTTP/1.1\r\nHost: a\r\n"
DISGUISED = {
    "two lengths": f"{POST}Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "a length with a sign": "POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\nx",
    "a negative length": "POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "a long length": f"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: {'1' * 30}\r\n\r\n",
    "a folded line": "GET /health HTTP/1.1\r\nHost: a\r\nX: y\r\n z: w\r\n bad\x00\r\n\r\n",
    "a space before the colon": "GET /health HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n",
    "a null": "GET /health HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    "a bare return": "GET /health HTTP/1.1\r\nHost: a\r\nX: a\rb: c\r\n\r\n",
    "no host": "GET /health HTTP/1.1\r\n\r\n",
    "two hosts": "GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a space in the path": "GET /health /x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a bad chunk": f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{CHUNKED}\r\n\r\nzz\r\n",
    "another encoding": f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n",
    "two encodings": f"POST /health HTTP/1.1\r\nHost: a\r\n{CHUNKED}\r\n{CHUNKED}\r\n\r\n",
    "no HTTP": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("name", DISGUISED)
async def test_threat_22_a_request_that_can_be_read_in_two_ways_is_refused(
    tokenizer: Tokenizer, shared_abused: Abused, name: str
) -> None:
    async with connected(shared_abused.port) as wire:
        await wire.send(DISGUISED[name].encode("latin-1"))
        ending = await wire.ending(DEADLINE_S)
    assert ending.status in (400, 415, 501), ending.received[:300]
    assert not ending.open_still
    assert len(ending.statuses) == 1
    assert ending.header("server") is None


async def test_threat_22_a_length_beside_chunks_smuggles_nothing(shared_abused: Abused) -> None:
    """RFC 9112, section 6.3: chunks win, and the connection may be closed."""
    inner = request("GET", "/v1/models")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n{CHUNKED}\r\n\r\n"
    async with connected(shared_abused.port) as wire:
        await wire.send(head.encode() + b"%x\r\n" % len(inner) + inner + b"\r\n0\r\n\r\n")
        await wire.send(request(headers={"Connection": "close"}))
        ending = await wire.ending(DEADLINE_S)
    assert ending.statuses[0] in (400, 415)
    assert b'"object":"list"' not in ending.received
    assert len(ending.statuses) <= 2


async def test_threat_22_what_proxies_say_is_not_believed(shared_abused: Abused) -> None:
    async with connected(shared_abused.port) as wire:
        forged = {"X-Forwarded-Host": "evil.example", "X-Forwarded-For": "1.2.3.4"}
        await wire.send(request(headers=forged | {"Forwarded": "host=evil", "Connection": "close"}))
        assert (await wire.ending()).status == 200
    async with connected(shared_abused.port) as wire:
        forged = {"Host": "evil.example", "X-Forwarded-Host": "localhost", "Connection": "close"}
        await wire.send(request(headers=forged))
        assert (await wire.ending()).status == 403


async def test_threat_22_requests_one_behind_the_other_are_answered_in_order(
    shared_abused: Abused,
) -> None:
    async with connected(shared_abused.port) as wire:
        paths = ("/health", "/v1/models", "/nowhere")
        asked = b"".join(request("GET", path) for path in paths)
        await wire.send(asked + request(headers={"Connection": "close"}))
        ending = await wire.ending()
    assert ending.statuses == [200, 200, 404, 200]


# --- safe headers ----------------------------------------------------------------------------


async def test_every_answer_has_safe_headers(http: Any) -> None:
    answers = [
        await http.get("/v1/models"),
        await http.get("/nowhere"),
        await http.get("/health", headers={"Host": "evil.example"}),
        await http.post(CHAT, json=chat(max_tokens=1)),
    ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers
    stream = await http.post(CHAT, json=chat(max_tokens=1, stream=True))
    assert stream.headers["cache-control"] == "no-cache"
