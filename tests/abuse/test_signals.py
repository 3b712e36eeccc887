"""Ends of a real process under load: SIGTERM, a second one, SIGKILL, and a device that hangs."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from kvcache.user_folders import prefixes_folder
from server.chat.drain import LAST_WORDS_S
from tests.abuse.processes import (
    END_LIMIT_S,
    SMALL,
    Ask,
    Clients,
    End,
    serving,
    streams,
    until_begun,
    whole,
)
from tests.clients.servers import QUIRE, Process, run_to_end
from tests.models import ModelSpec, write_model
from tests.server.harness import CHAT, chat, eventually

# The command, with a device that hangs after 20 steps.
HANGING = """
import threading
import metal_ext
import engine.step.runner
from server.cli import main

steps, sample = [], engine.step.runner.sample

def hanging(*arguments):
    steps.append(1)
    if len(steps) > 20:
        threading.Event().wait()
    return sample(*arguments)

engine.step.runner.sample = hanging
main()
"""


def test_fault_10_a_process_whose_device_hangs_says_where_and_ends_with_1(tiny_model: Path) -> None:
    quire = (sys.executable, "-c", HANGING)
    with serving(tiny_model, *SMALL, "--set", "engine.watchdog_s=2", quire=quire) as server:
        body = chat("secret words", max_tokens=300, stream=True, logit_bias={"7": 100})
        with httpx2.stream("POST", server.url + CHAT, json=body, timeout=END_LIMIT_S) as response:
            text = "".join(response.iter_text())
        assert server.wait() == 1
    assert "the engine has ended" in text.split("\n\n")[-2]
    assert "[DONE]" not in text
    assert "a step of the engine has been running for" in server.text
    assert "EngineStats(running=1" in server.text
    assert "in hanging" in server.text
    assert "secret" not in server.text


# Steps of several milliseconds, so that answers are not complete before a signal comes.
SLOW = ModelSpec(num_hidden_layers=12, hidden_size=256, intermediate_size=1024)
LONG_TOKENS = 2000
LONG_DRAIN = ("--set", f"server.drain_s={10 * END_LIMIT_S}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "slow", SLOW)


@asynccontextmanager
async def told_to_end(
    server: Process, asks: Sequence[Ask]
) -> AsyncIterator[tuple[Clients, "asyncio.Future[list[End]]", float]]:
    """Clients whose streams have all begun when the signal comes; their ends, and when it was sent.
    At the block's end they are waited for, and the server, which must end with 0."""
    clients = Clients(server.url, asks)
    running = asyncio.ensure_future(clients.run())
    await until_begun(clients, sum(bool(ask.last) for ask in asks))
    signalled_s = time.monotonic()
    server.send(signal.SIGTERM)
    yield clients, running, signalled_s
    await running
    assert await asyncio.to_thread(server.wait) == 0
    assert "Traceback" not in server.text


async def send_second(server: Process) -> None:
    """A signal that the server does not take for the first one."""
    own = {"Connection": "close"}
    async with httpx2.AsyncClient(base_url=server.url, headers=own, timeout=END_LIMIT_S) as http:
        while (await http.get("/health")).json() != {"status": "draining"}:
            pass
    server.send(signal.SIGTERM)


async def test_fault_21_under_load_each_answer_is_complete_or_ends_with_an_error(
    model: Path,
) -> None:
    long, short = streams(LONG_TOKENS), streams(8)
    asks = [*long, *short, *map(whole, long)]
    with serving(model, *SMALL, *LONG_DRAIN) as server:
        async with told_to_end(server, asks) as (clients, running, _):
            # However long a step takes, who wants few of them is done long before the others.
            await eventually(lambda: clients.complete == len(short))
            await send_second(server)
    ends = running.result()
    assert ends[:4] == [End.ERROR] * 4, "too long for the time that there was"
    assert ends[4:8] == [End.COMPLETE] * 4
    assert ends[8:] == [End.ERROR] * 4


async def test_fault_21_what_is_not_answered_when_the_time_is_over_ends_with_an_error(
    model: Path,
) -> None:
    long = streams(LONG_TOKENS)
    starting = time.monotonic()
    with serving(model, *SMALL, "--set", "server.drain_s=1") as server:
        start_s = time.monotonic() - starting
        async with told_to_end(server, [*long, *map(whole, long)]) as (_, running, signalled_s):
            pass
    ended_s = time.monotonic() - signalled_s
    assert running.result() == [End.ERROR] * 8
    # Beyond the drain and the last words, the end is less work than the start.
    assert 1.0 <= ended_s < 1.0 + LAST_WORDS_S + start_s


async def test_fault_21_a_second_signal_is_immediate(model: Path) -> None:
    """Else the server would take longer to end than anybody waits for it here."""
    with serving(model, *SMALL, *LONG_DRAIN) as server:
        async with told_to_end(server, streams(LONG_TOKENS)) as (_, running, _):
            await send_second(server)
    assert running.result() == [End.ERROR] * 4


def files_of(server: Process) -> list[str]:
    """What it has open, by name."""
    names = []
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(entry))
    return names


async def test_fault_22_whenever_it_is_killed_nothing_is_left_and_the_next_start_is_clean(
    tiny_model: Path,
) -> None:
    for begun in (0, 2):
        with serving(tiny_model, *SMALL) as server:
            assert httpx2.get(f"{server.url}/ready").status_code == 200
            assert any("memfd:" in name for name in files_of(server))
            named = [n for n in files_of(server) if n.startswith("/") and "(deleted)" not in n]
            kept = "/dev/", str(prefixes_folder(None))
            assert [name for name in named if not name.startswith(kept)] == []
            clients = Clients(server.url, streams(200)[:2])
            running = asyncio.ensure_future(clients.run())
            await until_begun(clients, begun)
            server.send(signal.SIGKILL)
            assert server.process.wait(10.0) == -signal.SIGKILL
            assert len(await running) == 2, "nobody waits for ever"


def test_fault_16_a_broken_model_ends_the_process_with_3_before_a_port_is_bound(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ended = run_to_end(QUIRE, "serve", folder, "--port", "0")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "model.safetensors" in ended.stderr
    assert "serving" not in ended.stderr
    assert "Traceback" not in ended.stderr
