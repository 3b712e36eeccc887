"""Signals to a real process under load: SIGTERM, a second one, SIGKILL."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from tests.abuse.processes import (
    SMALL,
    Ask,
    Clients,
    End,
    Process,
    serving,
    streams,
    until_begun,
    whole,
)
from tests.clients.servers import QUIRE
from tests.models import ModelSpec, write_model

# Steps of several milliseconds, so that answers are not complete before a signal comes.
SLOW = ModelSpec(num_hidden_layers=12, hidden_size=256, intermediate_size=1024)
LONG_TOKENS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "slow", SLOW)


async def told_to_end(
    server: Process, asks: Sequence[Ask], *, signals: int = 1
) -> tuple[list[End], int, float]:
    """Ends of the requests, exit code, and seconds from the first signal to the exit."""
    clients = Clients(server.url, asks)
    running = asyncio.ensure_future(clients.run())
    await until_begun(clients, sum(bool(ask.last) for ask in asks))
    began = time.monotonic()
    for _ in range(signals):
        server.send(signal.SIGTERM)
        await asyncio.sleep(0.2)
    ends = await running
    code = await asyncio.to_thread(server.wait)
    return ends, code, time.monotonic() - began


async def test_fault_21_under_load_each_answer_is_complete_or_ends_with_an_error(
    model: Path,
) -> None:
    long, short = streams(LONG_TOKENS), streams(8)
    asks = [*long, *short, *map(whole, long)]
    with serving(model, *SMALL, "--set", "server.drain_s=1") as server:
        ends, code, seconds = await told_to_end(server, asks)
    assert code == 0
    assert ends[:4] == [End.ERROR] * 4, "too long for the time that there was"
    assert ends[4:8] == [End.COMPLETE] * 4
    assert ends[8:] == [End.ERROR] * 4
    assert 1.0 <= seconds < 8.0
    assert "Traceback" not in server.text


async def test_fault_21_a_second_signal_is_immediate(model: Path) -> None:
    with serving(model, *SMALL, "--set", "server.drain_s=60") as server:
        ends, code, seconds = await told_to_end(server, streams(LONG_TOKENS), signals=2)
    assert code == 0
    assert ends == [End.ERROR] * 4
    assert seconds < 8.0


def files_of(server: Process) -> list[str]:
    """What it has open, by name."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    return [os.readlink(entry) for entry in folder.iterdir()]


async def test_fault_22_whenever_it_is_killed_nothing_is_left_and_the_next_start_is_clean(
    tiny_model: Path,
) -> None:
    for begun in (0, 2):
        with serving(tiny_model, *SMALL) as server:
            assert httpx2.get(f"{server.url}/ready").status_code == 200
            assert any("memfd:" in name for name in files_of(server))
            named = [n for n in files_of(server) if n.startswith("/") and "(deleted)" not in n]
            assert [name for name in named if not name.startswith("/dev/")] == []
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
    ended = subprocess.run(
        [QUIRE, "serve", str(folder), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "model.safetensors" in ended.stderr
    assert "serving" not in ended.stderr
    assert "Traceback" not in ended.stderr
