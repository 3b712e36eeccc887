"""Honest and rude clients together, for as long as one likes: ``python -m tests.abuse.soak``.

Rounds of load are followed by rests. In a rest nothing may be left of any client: no connection,
no request, no block, no descriptor, no thread; and what K and V take of the system is back at its
idle figure. Rests are compared with the first one, when all that is made once has been made. Every
honest answer must be complete, or refused with a time to come back; or the connection closed at
once, where there are twice as many as the server is to have.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.abuse import clients
from tests.abuse.clients import Ending
from tests.clients.servers import QUIRE, serving

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo" / "model"
MIB = 1024**2
HEAP_BYTES = 4 * MIB
RECEIVE_S = 1.0
SETTINGS = {
    "limits.max_receive_s": RECEIVE_S,
    "limits.max_reader_stall_s": 1.5,
    "limits.max_connections": 128,
    "limits.max_queued_requests": 24,
    "limits.keep_alive_s": 2,
    "limits.max_request_s": 20,
    "cache.kv_budget": "32MiB",
    "cache.heap_size": HEAP_BYTES,
    "cache.idle_release_s": 1,
    "cache.prefix_keep_s": 1,
    "engine.max_num_seqs": 16,
    "log.requests": False,
    "server.drain_s": 2,
}
HONEST = 12
RUDE = 24
CROWD = 60
AT_ONCE_S = 1.0
ROUND_S = 25.0
REST_LIMIT_S = 20.0
REST_POLL_S = 0.2
ANSWER_LIMIT_S = 90.0
QUESTION = "What is a page table, and what is quarantined? " * 8
# What a process may have grown by, in all rounds together: allocators keep what they once had.
GROWTH_LIMIT_BYTES = 48 * MIB


@dataclass(frozen=True)
class Rest:
    """What is left when nobody asks for anything."""

    live: int
    quarantined: int
    committed: int
    heaps: int
    connections: int
    descriptors: int
    """Without those of heaps, which are kept."""
    threads: int
    resident: int

    @property
    def is_quiet(self) -> bool:
        return not (self.live or self.quarantined or self.connections)

    def problems(self, first: "Rest") -> list[str]:
        """What must not be, compared with the first rest."""
        found = []
        if not self.is_quiet:
            found.append(f"{self.live} bytes live, {self.connections} connections at rest")
        if self.committed > HEAP_BYTES:
            found.append(f"{self.committed} bytes of K and V are committed at rest")
        if self.descriptors > first.descriptors:
            found.append(f"{self.descriptors} descriptors, {first.descriptors} at first")
        if self.threads > first.threads:
            found.append(f"{self.threads} threads, {first.threads} at first")
        if self.resident > first.resident + GROWTH_LIMIT_BYTES:
            grown = (self.resident - first.resident) / MIB
            found.append(f"the process has grown by {grown:.0f} MiB")
        return found


def cut_off_late(closed_s: Sequence[float], refused_s: Sequence[float]) -> list[str]:
    """What must not be of those who were cut off without a word, which is less work than to refuse
    somebody with words. Seconds that each took on this machine."""
    at_once_s = max([AT_ONCE_S, *refused_s])
    late = [seconds for seconds in closed_s if seconds > at_once_s]
    if not late:
        return []
    return [
        f"{len(late)} honest clients were cut off without a word, after up to {max(late):.1f} s"
    ]


@dataclass
class Soak:
    """One server and all its clients."""

    port: int
    process: psutil.Process
    random: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """What refusals of the running round took."""
    closed_s: list[float] = field(default_factory=list)
    """What it took to be cut off without a word."""

    async def run(self, minutes: float) -> None:
        """Rounds and rests, until the time has passed."""
        end = time.monotonic() + 60 * minutes
        while not self.rests or time.monotonic() < end:
            await self._round(min(time.monotonic() + ROUND_S, max(end, time.monotonic() + 5)))
            self.rests.append(await self._rest())
            self.problems += self.rests[-1].problems(self.rests[0])

    async def _round(self, end: float) -> None:
        async def repeat(client: Callable[[], Coroutine[None, None, None]]) -> None:
            while time.monotonic() < end:
                await client()

        await asyncio.gather(
            *(repeat(self._honest) for _ in range(HONEST)),
            *(repeat(self._rude) for _ in range(RUDE)),
        )
        self.problems += cut_off_late(self.closed_s, self.refused_s)
        self.refused_s, self.closed_s = [], []

    # --- clients --------------------------------------------------------------------------------

    async def _honest(self) -> None:
        """Asks as a chat does, and must be answered or told when to come again."""
        stream = self.random.random() < 0.7
        body = {
            "messages": [{"role": "user", "content": QUESTION + str(self.random.randrange(4))}],
            "max_tokens": self.random.randint(1, 60),
            "temperature": 0.8,
            "stream": stream,
        }
        data = clients.request(
            "POST", clients.CHAT, {"Connection": "close"}, json.dumps(body).encode()
        )
        ending = await clients.one_of_many(self.port, data, ANSWER_LIMIT_S)
        self._count("honest", ending)
        if ending.status in (429, 503) and ending.header("Retry-After"):
            self.refused_s.append(ending.seconds)
            await asyncio.sleep(0.2)
        elif ending.status is None and not ending.open_still:
            self.closed_s.append(ending.seconds)
            await asyncio.sleep(0.2)
        elif ending.status == 408 and ending.sent_s > RECEIVE_S:
            self.outcomes["honest: slow itself"] += 1
        elif ending.status != 200:
            self.problems.append(f"an honest client was given {ending.outcome}")
        elif (b"data: [DONE]" if stream else b'"finish_reason"') not in ending.body:
            self.problems.append(f"an honest answer ended with {ending.body[-60:]!r}")

    async def _rude(self) -> None:
        """One of those that nobody wants."""
        port, draw = self.port, self.random
        small = clients.chat_request(max_tokens=4)
        long = clients.chat_request(QUESTION, stream=True, max_tokens=400)
        kinds: dict[str, Callable[[], Coroutine[None, None, Ending | None]]] = {
            "silent": lambda: clients.silent(port),
            "slow headers": lambda: clients.slow_headers(port, 0.1),
            "slow body": lambda: clients.slow_body(port, 0.1),
            "huge head": lambda: clients.huge_head(port, 2),
            "huge body": lambda: clients.huge_body(port, 12),
            "never reading": lambda: clients.never_reading(port, max_tokens=2000, n=2),
            "leaves at once": lambda: clients.leaving(port, b"", small),
            "leaves in the answer": lambda: clients.leaving(port, b"data: ", long),
            "no key, no host": lambda: clients.one_of_many(
                port, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"
            ),
            "two lengths": lambda: clients.one_of_many(
                port, small.replace(b"Host", b"Content-Length: 3\r\nHost", 1)
            ),
            "a crowd": lambda: self._crowd(small),
        }
        kind = draw.choice(list(kinds))
        try:
            ending = await kinds[kind]()
        except OSError as error:
            self.outcomes[f"{kind}: {type(error).__name__}"] += 1
            return
        if ending is None:
            self.outcomes[f"{kind}: left"] += 1
        else:
            self._count(kind, ending)
            if ending.open_still or (ending.status or 0) == 500:
                self.problems.append(f"{kind}: {ending.outcome} after {ending.seconds:.1f} s")

    async def _crowd(self, data: bytes) -> None:
        for ending in await clients.crowd(self.port, CROWD, data, ANSWER_LIMIT_S):
            self._count("a crowd", ending)

    def _count(self, kind: str, ending: Ending) -> None:
        self.outcomes[f"{kind}: {ending.outcome}"] += 1

    # --- rests ----------------------------------------------------------------------------------

    async def _rest(self) -> Rest:
        """What is left once memory has gone back, or after as long as that may take."""
        started = time.monotonic()
        while True:
            rest = await self._look()
            waited_s = time.monotonic() - started
            first = self.rests[0] if self.rests else rest
            if (rest.is_quiet and not rest.problems(first)) or waited_s > REST_LIMIT_S:
                return rest
            await asyncio.sleep(REST_POLL_S)

    async def _look(self) -> Rest:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as client:
            text = (await client.get("/metrics", headers={"Connection": "close"})).text
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.labels
        }
        heaps = int(values["quire_kv_heaps"])
        own = [c for c in self.process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
        return Rest(
            live=int(values["quire_kv_live_bytes"]),
            quarantined=int(values["quire_kv_quarantined_bytes"]),
            committed=int(values["quire_kv_committed_bytes"]),
            heaps=heaps,
            connections=len(own),
            descriptors=self.process.num_fds() - heaps,
            threads=self.process.num_threads(),
            resident=self.process.memory_info().rss,
        )

    def report(self) -> str:
        """The figures, as lines."""
        lines = ["rest   live  committed  heaps  connections  descriptors  threads  resident"]
        lines += [
            f"{number:4} {rest.live:6} {rest.committed / MIB:6.2f} MiB {rest.heaps:6} "
            f"{rest.connections:12} {rest.descriptors:12} {rest.threads:8} "
            f"{rest.resident / MIB:5.0f} MiB"
            for number, rest in enumerate(self.rests, start=1)
        ]
        lines += [f"{count:7,}  {what}" for what, count in sorted(self.outcomes.items())]
        return "\n".join(lines)


def soak(model: Path, minutes: float, seed: int) -> Soak:
    """Starts a server, lets clients loose on it, and ends it."""
    settings = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    with serving(QUIRE, "serve", str(model), "--port", "0", *settings) as (address, process):
        port = int(address.rpartition(":")[2])
        run = Soak(port, psutil.Process(process.pid), random.Random(seed))
        asyncio.run(run.run(minutes))
    return run


def main() -> int:
    """1 when something was not as it must be."""
    parser = argparse.ArgumentParser(description="Honest and rude clients together.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run = soak(DEMO, options.minutes, options.seed)
    print(run.report())
    print(f"{options.minutes:g} minutes, {sum(run.outcomes.values()):,} clients")
    for problem in sorted(set(run.problems)):
        print(f"NOT AS IT MUST BE: {problem}")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
