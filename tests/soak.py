"""1000 requests of random lengths with random aborts through the real server: ``make soak``.

While they run, the pool's figures are sampled from /metrics, every 20 ms and after every request.
What the system charges (``st_blocks`` of the heaps) must never exceed what the pool says that it
holds::

    committed <= live + one partial block per sequence + mapped ahead + cached + quarantined
                 + the configured slack

The server checks its cache's invariants after every step and ends at the first violation.
Afterwards nothing may be live or quarantined, and within five seconds at most one heap may be
committed (prefixes are kept for one second here).
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.peers import Program, Server
from tests.models import TINY, write_model

MIB = 1024**2
HEAP_BYTES = MIB
SLACK_BYTES = 2 * MIB
MAX_SEQUENCES = 16
THREADS = 2
STREAMS = 24
SAMPLE_INTERVAL_S = 0.02
IDLE_RELEASE_S = 1.0
RETURN_LIMIT_S = 5.0
ABORT_SHARE = 0.3
MAX_PROMPT_TOKENS = 900
MAX_NEW_TOKENS = 80
REQUEST_LIMIT_S = 120.0
WORDS = ("pages", "map", "behind", "addresses", "and", "nothing", "is", "copied", "by", "a", "join")


@dataclass(frozen=True)
class Pool:
    """One sample of /metrics, in bytes."""

    capacity: int
    committed: int
    live: int
    partial_tail: int
    mapped_ahead: int
    cached: int
    quarantined: int
    heaps: int
    copied: int

    @property
    def excess(self) -> int:
        """Return how much more is committed than the pool can account for; negative when there is
        room."""
        known = self.live + self.partial_tail + self.mapped_ahead + self.cached
        known += self.quarantined + SLACK_BYTES
        return self.committed - known


@dataclass
class Outcome:
    completed: int = 0
    aborted: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[Pool] = field(default_factory=list)
    seconds: float = 0.0
    last: Pool | None = None
    returned_s: float | None = None
    """Seconds after the last request until at most one heap was committed."""

    @property
    def most_committed(self) -> int:
        return max(sample.committed for sample in self.samples)

    def problems(self) -> list[str]:
        found = list(self.errors)
        assert self.last is not None
        if self.last.live or self.last.quarantined:
            found.append(
                f"{self.last.live} bytes live, {self.last.quarantined} quarantined at last"
            )
        if self.last.copied:
            found.append(f"{self.last.copied} bytes of K and V were copied")
        worst = max(sample.excess for sample in self.samples)
        if worst > 0:
            found.append(f"{worst} bytes were committed that the pool did not know of")
        if self.returned_s is None:
            found.append(f"more than a heap is committed {RETURN_LIMIT_S} s after the last request")
        return found


async def read_pool(client: httpx2.AsyncClient) -> Pool:
    text = (await client.get("/metrics")).text
    values = {
        sample.name: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Pool(
        capacity=values["quire_kv_capacity_bytes"],
        committed=values["quire_kv_committed_bytes"],
        live=values["quire_kv_live_bytes"],
        partial_tail=values["quire_kv_partial_tail_bytes"],
        mapped_ahead=values["quire_kv_mapped_ahead_bytes"],
        cached=values["quire_kv_cached_bytes"],
        quarantined=values["quire_kv_quarantined_bytes"],
        heaps=values["quire_kv_heaps"],
        copied=values["quire_kv_copied_bytes_total"],
    )


async def one_request(client: httpx2.AsyncClient, rng: random.Random, outcome: Outcome) -> None:
    """Send a streamed request that may be given up at any moment."""
    body = {
        "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, MAX_PROMPT_TOKENS // 7))),
        "max_tokens": rng.randint(1, MAX_NEW_TOKENS),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(2**32),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    patience_s = rng.expovariate(5.0) if rng.random() < ABORT_SHARE else REQUEST_LIMIT_S
    try:
        async with asyncio.timeout(patience_s):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.errors.append(f"status {response.status_code}")
                    return
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    except TimeoutError:
        outcome.aborted += 1
        return
    if lines[-1] != "data: [DONE]" or "usage" not in json.loads(lines[-2][6:]):
        outcome.errors.append(f"a stream ended with {lines[-1][:80]}")
    outcome.completed += 1


async def send_all(url: str, requests: int, seed: int, outcome: Outcome) -> None:
    """Keep STREAMS requests under way until all have been sent and have ended."""
    numbers = iter(range(requests))

    async def stream(client: httpx2.AsyncClient) -> None:
        for number in numbers:
            await one_request(client, random.Random(seed * 10**6 + number), outcome)
            outcome.samples.append(await read_pool(client))

    async def sample(client: httpx2.AsyncClient) -> None:
        while True:
            outcome.samples.append(await read_pool(client))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    limits = httpx2.Limits(max_connections=STREAMS + 2)
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_S, limits=limits) as client:
        sampling = asyncio.create_task(sample(client))
        started = time.monotonic()
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        outcome.seconds = time.monotonic() - started
        sampling.cancel()
        await settle(client, outcome)


async def settle(client: httpx2.AsyncClient, outcome: Outcome) -> None:
    """Wait until memory has gone back, for as long as it may take."""
    ended = time.monotonic()
    while time.monotonic() - ended < RETURN_LIMIT_S:
        outcome.last = await read_pool(client)
        if outcome.returned_s is None and outcome.last.committed <= HEAP_BYTES:
            outcome.returned_s = time.monotonic() - ended
        if outcome.returned_s is not None and outcome.last.quarantined == 0:
            return
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def run(folder: Path, requests: int, seed: int) -> Outcome:
    outcome = Outcome()
    settings = folder / "soak.toml"
    settings.write_text(
        "[engine]\ncheck_every_step = true\n"
        f"[cache]\nidle_release_s = {IDLE_RELEASE_S}\nprefix_keep_s = {IDLE_RELEASE_S}\n"
    )
    arguments = ["serve", str(folder), "--config", str(settings), "--kv-backend", "posix"]
    arguments += ["--heap-size", str(HEAP_BYTES), "--free-slack", str(SLACK_BYTES)]
    arguments += ["--max-num-seqs", str(MAX_SEQUENCES), "--max-model-len", "2048"]
    arguments += ["--kv-budget", "64MiB", "--log-level", "warning"]
    program = Program("quire", "quire", tuple(arguments), folder.name)
    with Server(program, THREADS) as server:
        base = f"http://{server.target.host}:{server.target.port}"
        asyncio.run(send_all(base, requests, seed, outcome))
    return outcome


def report(outcome: Outcome) -> str:
    assert outcome.last is not None
    samples, last = outcome.samples, outcome.last
    busiest = max(samples, key=lambda sample: sample.live)
    lines = [
        f"{outcome.completed} completed, {outcome.aborted} aborted, "
        f"{len(outcome.errors)} errors in {outcome.seconds:.0f} s, {len(samples)} samples",
        f"  committed at most           {outcome.most_committed / MIB:8.2f} MiB",
        f"  live at most                {busiest.live / MIB:8.2f} MiB "
        f"(committed then {busiest.committed / MIB:.2f} MiB)",
    ]
    room = -max(sample.excess for sample in samples)
    back = "not" if outcome.returned_s is None else f"{outcome.returned_s:.1f} s"
    lines += [
        f"  least room under the bound  {room / MIB:8.2f} MiB",
        f"  at last: live {last.live}, quarantined {last.quarantined}, copied {last.copied} bytes, "
        f"committed {last.committed / MIB:.2f} MiB",
        f"  one heap or less after      {back:>8}",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random requests and aborts through the server.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", replace(TINY, vocab_size=512))
        outcome = run(model, options.requests, options.seed)
        print(report(outcome), flush=True)
    problems = outcome.problems()
    for problem in problems:
        print(f"NOT AS IT MUST BE: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
