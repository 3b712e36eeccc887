"""A process that watches a server from outside: GET /health, honest streams, resident memory.

It is a process of its own, so that what the fuzzer does is not taken for the server's time.
"""

import asyncio
import json
import multiprocessing
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, pairwise
from multiprocessing.connection import Connection

import psutil

from tests.abuse.clients import request
from tests.fuzz.judgement import BACK_LIMIT_S, Figures

HEALTH_PAUSE_S = 0.02
REFUSED_PAUSE_S = 0.05
MEMORY_PAUSE_S = 0.01
CHILDREN_EVERY = 100
"""Looks at memory between two looks for child processes."""
CALM_S = 0.5
CLOSE = {"Connection": "close"}
HEALTH = request("GET", "/health", CLOSE)
STREAM = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": -1}


class Watch:
    """The fuzzer's end of the watching process. Times are those of ``time.monotonic``."""

    def __init__(self, port: int, pid: int, streams: int) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        arguments = (port, pid, streams, theirs)
        self._process = spawning.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def between(self, from_s: float, until_s: float) -> Figures:
        """What was seen, once /health and all streams have gone on after that."""
        self._connection.send((from_s, until_s))
        figures: Figures = self._connection.recv()
        return figures

    def calm(self) -> Figures:
        """What is seen from now on while nobody attacks, once all streams have begun."""
        now_s = time.monotonic()
        self.between(now_s, now_s)
        now_s = time.monotonic()
        return self.between(now_s, now_s + CALM_S)

    def close(self) -> None:
        """Ends the process, and with it its streams."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def gaps_s(times: Sequence[float], from_s: float, until_s: float) -> list[float]:
    """Between two of the times that follow each other, where the gap touches the while.

    Where nothing follows the while, the last gap is up to now.
    """
    first, behind = bisect_right(times, from_s), bisect_left(times, until_s)
    touched = list(times[max(first - 1, 0) : behind + 1])
    if behind >= len(times):
        touched.append(max(until_s, time.monotonic()))
    return [after - before for before, after in pairwise(touched)] or [0.0]


# --- in the process ------------------------------------------------------------------------------


def _main(port: int, pid: int, streams: int, connection: Connection) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_Watcher(port, pid, streams).run(connection))


class _Watcher:
    def __init__(self, port: int, pid: int, streams: int) -> None:
        self._port = port
        self._server = psutil.Process(pid)
        self._health: list[float] = []
        self._streams: list[list[float]] = [[] for _ in range(streams)]
        self._looks: list[float] = []
        self._resident: list[int] = []

    async def run(self, connection: Connection) -> None:
        """Until the fuzzer is gone."""
        stream = request("POST", "/v1/completions", CLOSE, json.dumps(STREAM).encode())
        asking = self._ask(HEALTH, b"HTTP/1.1 200", self._health, HEALTH_PAUSE_S)
        reading = [self._ask(stream, b"data: {", one, REFUSED_PAUSE_S) for one in self._streams]
        tasks = [asyncio.create_task(one) for one in (asking, *reading, self._read_memory())]
        with suppress(EOFError):
            while True:
                asked = await asyncio.to_thread(connection.recv)
                connection.send(await self._figures(*asked))
        for task in tasks:
            task.cancel()

    async def _ask(self, data: bytes, mark: bytes, times: list[float], pause_s: float) -> None:
        """Asks again and again, and notes when a line came that begins as it should."""
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(data)
                async for line in reader:
                    if line.startswith(mark) and b'"error"' not in line:
                        times.append(time.monotonic())
                writer.close()
            await asyncio.sleep(pause_s)

    async def _read_memory(self) -> None:
        processes: list[psutil.Process] = []
        for look in count():
            with suppress(psutil.NoSuchProcess):
                if look % CHILDREN_EVERY == 0:
                    processes = [self._server, *self._server.children(recursive=True)]
                self._resident.append(sum(int(one.memory_info().rss) for one in processes))
                self._looks.append(time.monotonic())
            await asyncio.sleep(MEMORY_PAUSE_S)

    async def _figures(self, from_s: float, until_s: float) -> Figures:
        lines = [self._health, *self._streams]

        def back() -> bool:
            return all(times and times[-1] > until_s for times in lines)

        while not back() and time.monotonic() < until_s + BACK_LIMIT_S:
            await asyncio.sleep(MEMORY_PAUSE_S)
        gaps = [gap for times in self._streams for gap in gaps_s(times, from_s, until_s)]
        resident = self._resident[max(bisect_left(self._looks, from_s) - 1, 0) :]
        return Figures(
            health_gap_s=max(gaps_s(self._health, from_s, until_s)),
            stream_gap_s=max(gaps, default=0.0),
            stream_p99_s=statistics.quantiles(gaps, n=100)[-1] if len(gaps) > 1 else 0.0,
            own_gap_s=max(gaps_s(self._looks, from_s, until_s)),
            peak_bytes=max(resident, default=0),
            last_bytes=resident[-1] if resident else 0,
            is_back=back(),
        )
