"""``quire serve`` on Macs in use answers, and ends in order."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.abuse.processes import END_LIMIT_S, Clients, End, streams, until_begun
from tests.clients.servers import Process
from tests.metal.darwin.macs import MACS, Mac
from tests.metal.darwin.product import serving

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "4", "--heap-size", "4MiB")
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is quire?"}],
    "temperature": 0,
    "max_tokens": 24,
}
CASES = [(mac, "sparse") for mac in MACS] + [(MACS[0].on_macos_14(), "paged")]


def answer(server: Process) -> str:
    """The whole answer."""
    url = f"{server.url}/v1/chat/completions"
    response = httpx2.post(url, json=QUESTION, timeout=END_LIMIT_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def streamed_answer(server: Process) -> str:
    """The same, of its pieces."""
    url, text = f"{server.url}/v1/chat/completions", ""
    with httpx2.stream(
        "POST", url, json=QUESTION | {"stream": True}, timeout=END_LIMIT_S
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        for choice in json.loads(line)["choices"]:
            text += choice["delta"].get("content") or ""
    return text


async def drains(server: Process) -> None:
    """SIGTERM in the middle of a stream lets it end, and the process ends with 0."""
    clients = Clients(server.url, streams(60)[:1])
    running = asyncio.ensure_future(clients.run())
    await until_begun(clients, 1)
    server.send(signal.SIGTERM)
    assert await running == [End.COMPLETE]
    assert await asyncio.to_thread(server.wait) == 0
    assert "Traceback" not in server.text


@pytest.mark.parametrize(("mac", "kv_backend"), CASES, ids=lambda given: str(given))
async def test_a_mac_in_use_serves_from_its_gpu(
    mac: Mac, kv_backend: str, figures: Path, model: Path
) -> None:
    with serving(mac, figures, model, *FLAGS) as server:
        assert f"KV backend: {kv_backend} on Metal; kernels: Metal" in server.text
        said = await asyncio.to_thread(answer, server)
        assert said
        assert await asyncio.to_thread(streamed_answer, server) == said
        await drains(server)


async def test_a_mac_serves_from_its_cpu_where_it_is_told_to(figures: Path, model: Path) -> None:
    flags = (*FLAGS, "--kv-backend", "posix", "--kv-budget", "16MiB")
    with serving(MACS[0], figures, model, *flags) as server:
        assert "KV backend: posix" in server.text
        assert await asyncio.to_thread(answer, server) == await asyncio.to_thread(
            streamed_answer, server
        )
        await drains(server)
