"""``quire serve`` as a process that signals are sent to, and clients that say how they ended."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.clients.servers import QUIRE, Process

START_LIMIT_S = 60.0
END_LIMIT_S = 60.0
SMALL = ("--kv-budget", "16MiB", "--heap-size", "1MiB", "--free-slack", "1MiB", "--threads", "1")


def started(model: Path, *arguments: str, quire: Sequence[str | Path] = (QUIRE,)) -> Process:
    """A server on a free port. quire: the command."""
    return Process(*quire, "serve", model, "--port", "0", *arguments)


@contextmanager
def serving(
    model: Path, *arguments: str, quire: Sequence[str | Path] = (QUIRE,)
) -> Iterator[Process]:
    """A server, which is gone afterwards."""
    process = started(model, *arguments, quire=quire)
    try:
        yield process
    finally:
        process.kill()


def port_of(process: psutil.Process) -> int:
    """Where a server listens, as soon as it does: its log may say so to nobody."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        time.sleep(0.05)
    raise AssertionError("it does not start")


# --- clients ---------------------------------------------------------------------------------


class End(Enum):
    """How a request ended for its client."""

    COMPLETE = "complete"
    ERROR = "ended by an error"
    REFUSED = "refused"
    CUT = "cut without an error"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a path, its body, and what stands at the end of a complete stream."""

    path: str
    body: dict[str, Any]
    last: str = ""
    """Of a stream; a whole answer has none."""


def streams(max_tokens: int) -> list[Ask]:
    """One for each API that streams; long answers, whatever the model says."""
    message = [{"role": "user", "content": "Tell me about pages."}]
    long = {"stream": True, "temperature": 0, "max_tokens": max_tokens}
    bias = {"logit_bias": {"7": 100}}
    return [
        Ask("/v1/chat/completions", {"messages": message} | long | bias, "data: [DONE]"),
        Ask("/v1/completions", {"prompt": "Once"} | long | bias, "data: [DONE]"),
        Ask("/v1/messages", {"messages": message} | long, "message_stop"),
        Ask(
            "/v1/responses",
            {
                "input": "Tell me.",
                "stream": True,
                "temperature": 0,
                "max_output_tokens": max_tokens,
            },
            "response.completed|response.incomplete",
        ),
    ]


def whole(ask: Ask) -> Ask:
    """The same without a stream."""
    return Ask(ask.path, ask.body | {"stream": False})


class Clients:
    """Requests that run side by side."""

    def __init__(self, url: str, asks: Sequence[Ask]) -> None:
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(base_url=url, timeout=END_LIMIT_S, limits=limits)
        self._asks = asks
        self.begun = 0
        """Streams that have had a first event."""
        self.complete = 0
        """Requests that have been answered in full."""

    async def run(self) -> list[End]:
        """How each of them ended, in order."""
        async with self._http:
            return await asyncio.gather(*map(self._ask, self._asks))

    async def _ask(self, ask: Ask) -> End:
        try:
            end = await (self._stream(ask) if ask.last else self._whole(ask))
        except httpx2.ConnectError:
            return End.REFUSED
        except httpx2.TransportError:
            return End.CUT
        self.complete += end is End.COMPLETE
        return end

    async def _stream(self, ask: Ask) -> End:
        text = ""
        async with self._http.stream("POST", ask.path, json=ask.body) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, (await response.aread()).decode())
            async for part in response.aiter_text():
                self.begun += not text
                text += part
        *_, last, end = text.split("\n\n")
        if end == "" and re.search(ask.last.replace("[", r"\["), last):
            return End.COMPLETE
        return End.ERROR if '"error"' in last and "shutting down" in last else End.CUT

    async def _whole(self, ask: Ask) -> End:
        response = await self._http.post(ask.path, json=ask.body)
        if response.status_code == 200:
            return End.COMPLETE
        return _refusal(response.status_code, response.text)


def _refusal(status: int, text: str) -> End:
    """An error of a whole answer, which must be one of its API's."""
    return End.ERROR if status == 503 and '"error"' in text else End.CUT


async def until_begun(clients: Clients, count: int) -> None:
    """Waits for the first events of so many streams."""
    deadline = time.monotonic() + START_LIMIT_S
    while clients.begun < count:
        assert time.monotonic() < deadline, "they do not begin"
        await asyncio.sleep(0.01)
