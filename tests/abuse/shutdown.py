"""SIGTERM under load on the demo model, several times: ``python -m tests.abuse.shutdown``.

Every request must be answered, or end with an error of its API; the process must end with 0 within
its drain. A round that does not is told, and the command ends with 1.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from tests.abuse.processes import Ask, Clients, End, serving, streams, until_begun, whole

MODEL = Path(__file__).parents[2] / "configs/demo/model"
LIMITS = ("--kv-budget", "512MiB", "--max-num-seqs", "24")
LONG_TOKENS, SHORT_TOKENS = 8000, 60
# What the end takes beyond the drain: last words, the engine's running step, the end of its memory.
# On a busy machine, as long as the start: that is more work.
MARGIN_S = 8.0


@dataclass(frozen=True, slots=True)
class Round:
    """One server's end."""

    streams: Counter[End]
    whole: Counter[End]
    exit_code: int
    start_s: float
    """Until the server said where it listens."""
    seconds: float
    """From the signal to the exit."""

    def __str__(self) -> str:
        parts = [f"{self.seconds:5.1f} s to the exit, code {self.exit_code}"]
        for name, ends in (("streams", self.streams), ("whole answers", self.whole)):
            told = ", ".join(f"{ends[end]} {end.value}" for end in End)
            parts.append(f"{name}: {told}")
        return "; ".join(parts)

    def is_good(self, drain_s: float) -> bool:
        """Whether nobody was left without an end, and the process ended in time."""
        bad = sum(
            ends[end] for ends in (self.streams, self.whole) for end in (End.CUT, End.REFUSED)
        )
        in_time = self.seconds <= drain_s + max(MARGIN_S, self.start_s)
        return not bad and self.exit_code == 0 and in_time


async def run_round(model: Path, num_streams: int, num_whole: int, drain_s: int) -> Round:
    """Half of the requests are for more than the drain has time for."""
    kinds = [
        one
        for pair in zip(streams(LONG_TOKENS), streams(SHORT_TOKENS), strict=False)
        for one in pair
    ]
    asks: list[Ask] = list(islice(cycle(kinds), num_streams))
    asks += list(islice(cycle([whole(ask) for ask in kinds]), num_whole))
    starting = time.monotonic()
    with serving(model, *LIMITS, "--set", f"server.drain_s={drain_s}") as server:
        start_s = time.monotonic() - starting
        clients = Clients(server.url, asks)
        running = asyncio.ensure_future(clients.run())
        await until_begun(clients, num_streams)
        began = time.monotonic()
        server.send(signal.SIGTERM)
        ends = await running
        code = await asyncio.to_thread(server.wait)
        seconds = time.monotonic() - began
    streamed, others = Counter(ends[:num_streams]), Counter(ends[num_streams:])
    return Round(streamed, others, code, start_s, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rounds; 1 when one of them was bad."""
    parser = argparse.ArgumentParser(prog="python -m tests.abuse.shutdown", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--whole", type=int, default=8)
    parser.add_argument("--drain", type=int, default=5, help="seconds")
    parser.add_argument("--model", type=Path, default=MODEL)
    asked = parser.parse_args(arguments)
    bad = 0
    for number in range(1, asked.rounds + 1):
        found = asyncio.run(run_round(asked.model, asked.streams, asked.whole, asked.drain))
        print(f"round {number}: {found}", flush=True)
        bad += not found.is_good(asked.drain)
    print(f"bad rounds: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
