"""Bodies that once held up everybody, or took memory without end, against a server that is watched
from outside."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.abuse.clients import request
from tests.abuse.processes import SMALL, serving
from tests.abuse.soak import DEMO
from tests.fuzz.judgement import KEPT_BYTES, MEMORY_FACTOR, MEMORY_FLOOR_BYTES
from tests.fuzz.target import WARM_UP, ask
from tests.fuzz.watch import CLOSE, Watch
from tests.server.harness import CHAT, COMPLETIONS, chat

GAP_LIMIT_S = 1.0
"""For others; a machine that is busy may take several tries."""
TRIES = 4
COMPILE_LIMIT_S = 0.5
# Also where the machine was too busy to judge it.
REFUSED = {400, 429}
IDLE_S = 0.5
SETTINGS = ("--set", f"limits.max_grammar_compile_s={COMPILE_LIMIT_S}", "--set", "log.requests=no")


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, and who looks at it."""

    port: int
    process: psutil.Process
    watch: Watch
    calm_bytes: int

    def post(self, path: str, body: bytes | dict[str, Any]) -> int | None:
        """The status of the answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return ask(self.port, request("POST", path, CLOSE, content)).status

    def rest(self) -> None:
        """Waits until it does nothing any more, also for those who have left."""
        before = -1.0
        while (now := sum(self.process.cpu_times()[:4])) > before + IDLE_S / 5:
            before = now
            time.sleep(IDLE_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with serving(DEMO, *SMALL, *SETTINGS) as process:
        port, pid = process.port, process.process.pid
        for path, body in WARM_UP:
            ask(port, request("POST", path, CLOSE, json.dumps(body).encode()))
        watch = Watch(port, pid, 0)
        yield Watched(port, psutil.Process(pid), watch, watch.calm().last_bytes)
        watch.close()


def form(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, chat(max_tokens=1, **fields)


BODIES: dict[str, tuple[str, bytes | dict[str, Any]]] = {
    "brackets": form(guided_grammar="[" * 25_000),
    "a quote that never closes": form(guided_grammar='"' + '\\"' * 25_000),
    "line breaks": form(guided_grammar='root ::= "a"' + "\n" * 40_000),
    "a deep invalid body": (
        CHAT,
        b'{"messages":%b0%b}' % (b"[" * 700 + b"0," * 200_000, b"]" * 700),
    ),
    "half a character": (CHAT, b'{"model":"\\ud800","messages":[%b0]}' % (b"0," * 4_000_000)),
    "a long text to tokenize": ("/tokenize", {"prompt": " " * 7_900_000}),
    "lists of ids": (COMPLETIONS, b'{"prompt":[%b[1]]}' % (b"[1]," * 1_400_000)),
    "empty texts": (
        "/v1/messages",
        b'{"max_tokens":1,"messages":[{"role":"user","content":[%b{"type":"text","text":"a"}]}]}'
        % (b'{"type":"text","text":""},' * 240_000),
    ),
    "items": (
        "/v1/responses",
        b'{"max_output_tokens":1,"input":[%b{"role":"user","content":"a"}]}'
        % (b'{"role":"user","content":[{"type":"input_text","text":""}]},' * 130_000),
    ),
    "empty parts": (
        CHAT,
        b'{"messages":[{"role":"user","content":[%b{"type":"text","text":"a"}]}]}'
        % (b'{"type":"text","text":""},' * 240_000),
    ),
    "messages": (
        CHAT,
        b'{"messages":[%b{"role":"user","content":"a"}]}'
        % (b'{"role":"user","content":"a"},' * 220_000),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_holds_up_nobody_and_takes_little_memory(server: Watched, name: str) -> None:
    path, body = BODIES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    allowed = MEMORY_FLOOR_BYTES + MEMORY_FACTOR * len(content)
    gaps = []
    while True:
        began_s = time.monotonic()
        status = server.post(path, content)
        seen = server.watch.between(began_s, time.monotonic())
        assert status is not None
        assert status < 500
        assert seen.is_back
        assert seen.peak_bytes - server.calm_bytes < allowed
        # While the watch itself does not run it sees nothing of the server.
        gaps.append(seen.health_gap_s - seen.own_gap_s)
        if gaps[-1] < GAP_LIMIT_S:
            break
        assert len(gaps) < TRIES, gaps


def bomb(number: int) -> dict[str, Any]:
    """A form of seconds of processor time, and half a GiB; each one another."""
    return chat(guided_regex=f"z{number}|" + "(ab|cd)*" * 12_000, max_tokens=1)


def test_forms_that_were_refused_leave_nothing_in_memory(server: Watched) -> None:
    assert {server.post(CHAT, bomb(number)) for number in range(2)} <= REFUSED
    server.rest()
    now_s = time.monotonic()
    kept = server.watch.between(now_s, now_s).last_bytes - server.calm_bytes
    assert kept < KEPT_BYTES


def test_nobody_waits_for_other_peoples_forms(server: Watched) -> None:
    alone_s = time.monotonic()
    assert server.post(CHAT, bomb(2)) in REFUSED
    alone_s = time.monotonic() - alone_s
    with ThreadPoolExecutor(4) as bombs:
        sent = [bombs.submit(server.post, CHAT, bomb(10 + number)) for number in range(4)]
        time.sleep(COMPILE_LIMIT_S / 2)
        began_s = time.monotonic()
        assert server.post(CHAT, chat(guided_choice=["yes", "no"], max_tokens=2)) == 200
        waited_s = time.monotonic() - began_s
        assert {answer.result() for answer in sent} <= REFUSED
    assert waited_s < 4 * 2 * alone_s
