"""A Mac is kept awake while it answers, and its low power mode is told.

Programs stand in for macOS's. What macOS makes of its own `caffeinate` is not known from here.
"""

import asyncio
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

from tests.abuse.processes import END_LIMIT_S, Clients, End, streams, until_begun
from tests.metal.darwin.macs import MACS, Mac
from tests.metal.darwin.product import serving

FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "4", "--kv-backend", "posix")
OTHERS = ("--host", "0.0.0.0", "--insecure-no-auth")
MAC = MACS[2]
LONG_TOKENS = 3000
LOW_POWER = "this Mac is in its low power mode"
MADE = re.compile(r"\+(\d+)")


def held(figures: Path) -> list[str]:
    """The assertions that are held."""
    lines = (figures / "power/assertions").read_text().splitlines()
    made = [found[1] for line in lines if (found := MADE.fullmatch(line))]
    released = [line[1:] for line in lines if line.startswith("-")]
    assert len(made) + len(released) == len(lines), lines
    return [number for number in made if number not in released]


async def until_held(figures: Path, count: int) -> None:
    deadline = time.monotonic() + END_LIMIT_S
    while len(held(figures)) != count:
        assert time.monotonic() < deadline, (figures / "power/assertions").read_text()
        await asyncio.sleep(0.05)


async def test_a_mac_is_kept_awake_while_it_answers(figures: Path, model: Path) -> None:
    with serving(MAC, figures, model, *FLAGS, "--kv-budget", "64MiB") as server:
        assert held(figures) == []
        clients = Clients(server.url, streams(LONG_TOKENS)[:1])
        running = asyncio.ensure_future(clients.run())
        await until_begun(clients, 1)
        await until_held(figures, 1)
        assert await running == [End.COMPLETE]
        await until_held(figures, 0)
        assert LOW_POWER not in server.text


async def test_a_mac_on_mains_that_others_ask_is_kept_awake_until_the_server_ends(
    figures: Path, model: Path
) -> None:
    saving: Mac = replace(MAC, saves_power=True)
    flags = (*FLAGS, "--kv-budget", "64MiB", *OTHERS)
    with serving(saving, figures, model, *flags) as server:
        await until_held(figures, 1)
        assert server.text.count(LOW_POWER) == 1
        server.send(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait) == 0
        assert held(figures) == []
