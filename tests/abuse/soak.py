"""Honest and rude clients together, for as long as one likes: ``python -m tests.abuse.soak``; or so
many honest requests, some of which are given up at a random moment: ``--requests 1000``.

Rounds of load are followed by rests. In a rest nothing may be left of any client: no connection,
no request, no block, no descriptor, no thread; and what K and V take of the system is back at its
idle figure. Rests are compared with the first one, when all that is made once has been made. Every
honest answer must be complete, or refused with a time to come back; or the connection closed at
once, where there are twice as many as the server is to have. The server checks its cache's
invariants after every step and ends at the first violation.

Beside honest clients alone the pool's figures are sampled, all the time and after every request:
what the system charges (``st_blocks`` of the heaps) must never exceed what the pool says that it
holds::

    committed <= live + one partial block per sequence + mapped ahead + cached + quarantined
                 + the configured slack
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.abuse import clients
from tests.abuse.clients import Ending
from tests.clients.servers import QUIRE, serving

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo" / "model"
MIB = 1024**2
HEAP_BYTES = MIB
SLACK_BYTES = 2 * MIB
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
    "cache.free_slack": SLACK_BYTES,
    "cache.idle_release_s": 1,
    "cache.prefix_keep_s": 1,
    "engine.max_num_seqs": 16,
    "engine.check_every_step": True,
    "log.requests": False,
    "server.drain_s": 2,
}
HONEST = 12
RUDE = 24
CROWD = 60
AT_ONCE_S = 1.0
ROUND_S = 25.0
SAMPLE_S = 0.02
REST_LIMIT_S = 20.0
HONEST_REST_LIMIT_S = 5.0
"""Where no client was rude."""
REST_POLL_S = 0.2
ANSWER_LIMIT_S = 90.0
LEFT_SHARE, LEFT_AFTER_S = 0.3, 0.2
"""Of honest clients, those who leave, and the mean of the times after which they do."""
QUESTION = "What is a page table, and what is quarantined? "
WORDS = ("pages", "map", "behind", "addresses", "and", "nothing", "is", "copied", "by", "a", "join")
METRICS = clients.request("GET", "/metrics", {"Connection": "close"})
WHOLE = {False: b'"finish_reason"', True: b"data: [DONE]"}
"""What an answer that is complete has, by whether it is a stream."""
# What a process may have grown by, in all rounds together: allocators keep what they once had.
GROWTH_LIMIT_BYTES = 48 * MIB


class LateError(ConnectionError):
    """This program sent a request so late that the server had to close the connection."""


class Pool(NamedTuple):
    """What /metrics says of K and V, by the ends of its names."""

    committed_bytes: int
    live_bytes: int
    partial_tail_bytes: int
    mapped_ahead_bytes: int
    cached_bytes: int
    quarantined_bytes: int
    copied_bytes_total: int
    heaps: int

    @property
    def excess_bytes(self) -> int:
        """What is committed beyond what the pool can account for; negative where there is room."""
        return self.committed_bytes - sum(self[1:6]) - SLACK_BYTES


@dataclass(frozen=True)
class Rest:
    """What is left when nobody asks for anything."""

    pool: Pool
    connections: int
    descriptors: int
    """Without those of heaps, which are kept."""
    threads: int
    resident: int

    @property
    def is_quiet(self) -> bool:
        return not (self.pool.live_bytes or self.pool.quarantined_bytes or self.connections)

    def problems(self, first: "Rest") -> list[str]:
        """What must not be, compared with the first rest."""
        found = []
        if not self.is_quiet:
            found.append(f"{self.connections} connections at rest, and {self.pool}")
        if self.pool.committed_bytes > HEAP_BYTES:
            found.append(f"{self.pool.committed_bytes} bytes of K and V are committed at rest")
        if self.descriptors > first.descriptors:
            found.append(f"{self.descriptors} descriptors, {first.descriptors} at first")
        if self.threads > first.threads:
            found.append(f"{self.threads} threads, {first.threads} at first")
        if self.resident > first.resident + GROWTH_LIMIT_BYTES:
            grown = (self.resident - first.resident) / MIB
            found.append(f"the process has grown by {grown:.0f} MiB")
        return found


def cut_off_late(closed_s: Sequence[float], refused_s: Sequence[float], own_s: float) -> list[str]:
    """What must not be of those who were cut off without a word, which is less work than to refuse
    somebody with words. Seconds that each took on this machine. own_s: how late the clients' own
    program came to its work."""
    at_once_s = max([AT_ONCE_S, *refused_s]) + own_s
    late = [seconds for seconds in closed_s if seconds > at_once_s]
    if not late:
        return []
    return [
        f"{len(late)} honest clients were cut off without a word, after up to {max(late):.1f} s"
    ]


def turns(until_s: float) -> Iterator[None]:
    """One after the other up to a time of ``time.monotonic``."""
    while time.monotonic() < until_s:
        yield


@dataclass
class Soak:
    """One server and all its clients."""

    port: int
    process: psutil.Process
    random: random.Random
    requests: int
    """Of honest clients alone; 0: beside rude ones, for a time."""
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    samples: list[Pool] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """What refusals of the running round took."""
    closed_s: list[float] = field(default_factory=list)
    """What it took to be cut off without a word."""
    late_s: float = 0.0
    """How late this program came to its work in the running round."""

    async def run(self, minutes: float) -> None:
        """Run rounds with rests between them for this time, or one round of ``requests``."""
        end = time.monotonic() + 60 * minutes
        while not self.rests or time.monotonic() < end:
            if self.requests:
                await self._round(range(self.requests), 2 * HONEST, 0)
            else:
                until = min(time.monotonic() + ROUND_S, max(end, time.monotonic() + 5))
                await self._round(turns(until), HONEST, RUDE)
            self.rests.append(await self._rest())
            self.problems += self.rests[-1].problems(self.rests[0])
        if self.requests and (copied := self.rests[-1].pool.copied_bytes_total):
            self.problems.append(f"{copied} bytes of K and V were copied")
        if self.excess_bytes > 0:
            self.problems.append(f"{self.excess_bytes} bytes were committed without a use")

    async def _round(self, turns: Iterable[object], honest: int, rude: int) -> None:
        """Clients, each of which takes turns of all, until there is none left."""
        left = iter(turns)

        async def repeat(client: Callable[[], Coroutine[None, None, None]]) -> None:
            for _ in left:
                await client()

        async def watch() -> None:
            while True:
                await self._sample()
                due_s = time.monotonic() + SAMPLE_S
                await asyncio.sleep(SAMPLE_S)
                self.late_s = max(self.late_s, time.monotonic() - due_s)

        watching = asyncio.create_task(watch())
        await asyncio.gather(
            *(repeat(self._honest) for _ in range(honest)),
            *(repeat(self._rude) for _ in range(rude)),
        )
        watching.cancel()
        self.problems += cut_off_late(self.closed_s, self.refused_s, self.late_s)
        self.refused_s, self.closed_s, self.late_s = [], [], 0.0

    async def _sample(self) -> None:
        if self.requests:
            with suppress(LateError):
                self.samples.append(await self._pool())

    # --- clients --------------------------------------------------------------------------------

    async def _honest(self) -> None:
        """Asks as a chat does, and must be answered or told when to come again; or leaves."""
        draw = self.random
        leaves, stream = draw.random() < LEFT_SHARE, draw.random() < 0.7
        words = [QUESTION * draw.randint(1, 8), *draw.choices(WORDS, k=draw.randint(0, 128))]
        body = {
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": draw.randint(1, 80),
            "temperature": draw.choice([0.0, 0.8]),
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        data = clients.request(
            "POST", clients.CHAT, {"Connection": "close"}, json.dumps(body).encode()
        )
        patience_s = draw.expovariate(1 / LEFT_AFTER_S) if leaves else ANSWER_LIMIT_S
        ending = await clients.one_of_many(self.port, data, patience_s)
        self._count("honest", ending)
        await self._sample()
        if leaves and ending.open_still:
            return
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
        elif not all(mark in ending.body for mark in (b'"completion_tokens"', WHOLE[stream])):
            self.problems.append(f"an honest answer ended with {ending.body[-60:]!r}")

    async def _rude(self) -> None:
        """One of those that nobody wants."""
        port, draw = self.port, self.random
        small = clients.chat_request(max_tokens=4)
        long = clients.chat_request(QUESTION * 8, stream=True, max_tokens=400)
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
        limit_s = HONEST_REST_LIMIT_S if self.requests else REST_LIMIT_S
        while True:
            with suppress(LateError):
                rest = await self._look()
                waited_s = time.monotonic() - started
                first = self.rests[0] if self.rests else rest
                if (rest.is_quiet and not rest.problems(first)) or waited_s > limit_s:
                    return rest
            await asyncio.sleep(REST_POLL_S)

    async def _look(self) -> Rest:
        pool = await self._pool()
        own = [c for c in self.process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
        return Rest(
            pool=pool,
            connections=len(own),
            descriptors=self.process.num_fds() - pool.heaps,
            threads=self.process.num_threads(),
            resident=self.process.memory_info().rss,
        )

    @property
    def excess_bytes(self) -> int:
        """The most of all samples."""
        return max((pool.excess_bytes for pool in self.samples), default=0)

    async def _pool(self) -> Pool:
        """Raises LateError, or ConnectionError where it is refused, or cut off."""
        told = await clients.one_of_many(self.port, METRICS)
        if told.status in (None, 408) and told.sent_s > RECEIVE_S:
            raise LateError(told.outcome)
        if told.status != 200:
            raise ConnectionError(told.outcome)
        values = {
            sample.name: int(sample.value)
            for family in text_string_to_metric_families(told.body.decode())
            for sample in family.samples
        }
        return Pool(*(values[f"quire_kv_{name}"] for name in Pool._fields))

    def report(self) -> str:
        """The figures, as lines."""
        lines = [
            f"{len(self.samples)} samples, least room under the bound "
            f"{-self.excess_bytes / MIB:.2f} MiB",
            "rest   live  committed  heaps  connections  descriptors  threads  resident",
        ]
        lines += [
            f"{number:4} {rest.pool.live_bytes:6} {rest.pool.committed_bytes / MIB:6.2f} MiB "
            f"{rest.pool.heaps:6} "
            f"{rest.connections:12} {rest.descriptors:12} {rest.threads:8} "
            f"{rest.resident / MIB:5.0f} MiB"
            for number, rest in enumerate(self.rests, start=1)
        ]
        lines += [f"{count:7,}  {what}" for what, count in sorted(self.outcomes.items())]
        return "\n".join(lines)


def soak(model: Path, minutes: float, seed: int, requests: int = 0) -> Soak:
    """Starts a server, lets clients loose on it, and ends it."""
    settings = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    with serving(QUIRE, "serve", str(model), "--port", "0", *settings) as server:
        run = Soak(server.port, psutil.Process(server.process.pid), random.Random(seed), requests)
        asyncio.run(run.run(minutes))
    return run


def main() -> int:
    """1 when something was not as it must be."""
    parser = argparse.ArgumentParser(description="Honest and rude clients together.")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=0, help="honest ones, instead")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started_s = time.monotonic()
    run = soak(DEMO, options.minutes, options.seed, options.requests)
    print(run.report())
    print(
        f"{(time.monotonic() - started_s) / 60:.1f} minutes, {sum(run.outcomes.values()):,} clients"
    )
    for problem in sorted(set(run.problems)):
        print(f"NOT AS IT MUST BE: {problem}")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
