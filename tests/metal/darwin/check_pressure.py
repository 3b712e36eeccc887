"""A Mac whose memory macOS calls short ("warning", as with any larger model) works on.

Unless the release test has passed, no memory of the GPU's cache can be released, so that a warning
ends no sequence and evicts no prefix. After that test, a warning releases free heaps alone.
"""

import asyncio
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

from tests.abuse.processes import END_LIMIT_S, Clients, End, streams, until_begun
from tests.clients.servers import Process
from tests.metal.darwin.macs import MACS, SHELL_LIMIT, WARNING
from tests.metal.darwin.product import command, serving

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "4", "--heap-size", "4MiB")
TOLD = "memory pressure of the system: warning"
TOLD_LIMIT_S = 20.0
PROMPT = "Tell me about pages. " * 30
SHORT = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
LONG_TOKENS = 600
PAUSE_S = 1.0
MAC = MACS[1].with_limit(SHELL_LIMIT)
assert MAC.pressure == WARNING
PASS = """
from kvcache.backends.choice import KVBackend
from kvcache.selftest.run import SelfTest, write_stamp
write_stamp(SelfTest.RELEASE, KVBackend.SPARSE)
"""


@pytest.fixture(params=[True, False], ids=["heaps are kept", "heaps may go"])
def kept(request: pytest.FixtureRequest, figures: Path) -> bool:
    """Whether that Mac keeps heaps, because the release test has not passed there."""
    if not request.param:
        python = command(MAC, MAC.told(figures), "python")
        subprocess.run([*python, "-c", PASS], check=True)
    return bool(request.param)


async def told(server: Process) -> None:
    """Waits until the server has seen the pressure."""
    deadline = time.monotonic() + TOLD_LIMIT_S
    while TOLD not in server.text:
        assert time.monotonic() < deadline, "nobody has looked at the pressure"
        await asyncio.sleep(0.05)


async def test_a_request_does_not_wait_for_another_one_to_end(
    figures: Path, model: Path, kept: bool
) -> None:
    with serving(MAC, figures, model, *FLAGS) as server:
        await told(server)
        first = Clients(server.url, streams(LONG_TOKENS)[:1])
        running = asyncio.ensure_future(first.run())
        await until_begun(first, 1)
        async with httpx2.AsyncClient(base_url=server.url, timeout=END_LIMIT_S) as http:
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
            figures_now = (await http.get("/metrics")).text
            assert ("\nquire_kv_heaps_kept 0.0\n" not in figures_now) == kept
        assert not running.done(), "the second request was answered when the first had ended"
        assert await running == [End.COMPLETE]


@pytest.mark.usefixtures("kept")
async def test_a_prompt_is_found_again(figures: Path, model: Path) -> None:
    with serving(MAC, figures, model, *FLAGS) as server:
        await told(server)
        async with httpx2.AsyncClient(base_url=server.url, timeout=END_LIMIT_S) as http:
            for _ in range(2):
                usage = (await http.post("/v1/completions", json=SHORT)).json()["usage"]
                await asyncio.sleep(PAUSE_S)
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert found > 0, f"{found} of {usage['prompt_tokens']} tokens were found computed"
