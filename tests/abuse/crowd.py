"""A thousand clients at once beside honest streams: ``python -m tests.abuse.crowd``.

Each of the thousand gets an answer, is told to come back later, or is cut off after a stated limit;
the streams go on meanwhile. Ends with 1 where that is not so. The crowd is a process of its own, so
that what it costs is not taken for the server's time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.abuse.clients import READ_BYTES, Ending, chat_request, connected, crowd
from tests.clients.environments import ROOT
from tests.clients.servers import QUIRE, serving

SIZE = 1000
# The streams of a server that has something to do: the crowd may fill what is left of its batch,
# and these are held to MAX_RATIO. For few streams a full batch alone is more: they are shown.
STREAMS = 16
FEW_STREAMS = 4
CALM_S = 5.0
MAX_CROWD_S = 600.0  # of one that is left hanging
MAX_RATIO = 2.0
# Steps take in prompts up to a time, which is many times that of very short steps: who gets a token
# this often reads on without noticing.
SMOOTH_GAP_MS = 30.0
MOST_RUNS = 3
ANSWER_TOKENS = 4
REFUSALS = (b"HTTP/1.1 429", b"HTTP/1.1 503")
REFUSED_S = 0.2
STREAM_TOKENS = 400
ACCOUNTED = ("answered", "429 with Retry-After", "503 with Retry-After", "closed without a word")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    outcomes: Counter[str]
    calm_gap_ms: float
    """Median between two tokens of a stream, before the crowd comes."""
    crowded_gap_ms: float
    """The same while it is there."""
    crowd_s: float
    streams: int = STREAMS

    @property
    def ratio(self) -> float:
        """How much slower the streams are."""
        return self.crowded_gap_ms / self.calm_gap_ms

    @property
    def is_slow(self) -> bool:
        """Whether the streams were slowed down more than they may be."""
        slower = self.ratio > MAX_RATIO and self.crowded_gap_ms > SMOOTH_GAP_MS
        return slower and self.streams >= STREAMS

    def problems(self) -> list[str]:
        """What must not be."""
        others = {name: count for name, count in self.outcomes.items() if name not in ACCOUNTED}
        found = [f"{count} of the crowd: {name}" for name, count in others.items()]
        if not self.outcomes["answered"]:
            found.append("nobody was answered")
        if self.is_slow:
            found.append(f"the streams' gaps are {self.ratio:.2f} times as long")
        return found

    @property
    def only_slow(self) -> bool:
        """Whether that is all that is wrong."""
        return len(self.problems()) == 1 and self.is_slow

    def lines(self) -> list[str]:
        """For people."""
        counts = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common())
        return [
            f"crowd of {self.outcomes.total()}, gone after {self.crowd_s:.1f} s: {counts}",
            f"median gap of {self.streams} streams: {self.calm_gap_ms:.1f} ms without the crowd, "
            f"{self.crowded_gap_ms:.1f} ms beside it, ratio {self.ratio:.2f}",
        ]


def outcome_of(ending: Ending) -> str:
    """What became of one of them, in a few words."""
    if ending.open_still:
        return "left hanging"
    if ending.status == 200:
        return "answered" if b'"usage"' in ending.body else "cut in the middle"
    if ending.status in (429, 503):
        later = ending.header("retry-after") is not None
        return f"{ending.status} with Retry-After" if later else f"{ending.status} without a time"
    return "closed without a word" if ending.status is None else f"status {ending.status}"


class Readers:
    """Streams that are read all the time; when one ends the next one begins."""

    def __init__(self, port: int, streams: int) -> None:
        self._port = port
        self.arrivals: list[list[float]] = [[] for _ in range(streams)]
        """Times at which text came, in seconds, by reader."""

    async def read(self, number: int) -> None:
        """Until it is cancelled. A turn that is refused, as any beside the crowd may be, is tried
        again."""
        for turn in range(sys.maxsize):
            asked = chat_request(
                f"Reader {number}, turn {turn}: tell a long story.",
                stream=True,
                max_tokens=STREAM_TOKENS,
                ignore_eos=True,
            )
            async with connected(self._port) as wire:
                await wire.send(asked)
                received = await wire.read_some(READ_BYTES)
                if received.startswith(REFUSALS):
                    await asyncio.sleep(REFUSED_S)
                    continue
                while b"[DONE]" not in received:
                    data = await wire.read_some(READ_BYTES)
                    if not data:
                        raise ConnectionError(f"a stream broke off behind {received!r}")
                    received = received[-10:] + data
                    if b'content":' in data or b'reasoning":' in data:
                        self.arrivals[number].append(time.monotonic())

    def median_gap_ms(self, from_s: float, until_s: float) -> float:
        """Of all readers together."""
        gaps: list[float] = []
        for times in self.arrivals:
            inside = [at for at in times if from_s <= at <= until_s]
            gaps += [after - before for before, after in pairwise(inside)]
        return 1e3 * statistics.median(gaps)


async def measure(port: int, size: int, calm_s: float, streams: int) -> Outcome:
    """Readers alone, then the crowd beside them."""
    readers = Readers(port, streams)
    reading = [asyncio.ensure_future(readers.read(number)) for number in range(streams)]
    try:
        await asyncio.sleep(1.0)
        calm_from_s = time.monotonic()
        await asyncio.sleep(calm_s)
        crowd_from_s = time.monotonic()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.abuse.crowd", "--size", str(size), "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        told, _ = await child.communicate()
        gone_s = time.monotonic()
        for task in reading:
            if task.done():
                task.result()
        result = json.loads(told)
        began_s = gone_s - result["seconds"]
        return Outcome(
            Counter(result["outcomes"]),
            readers.median_gap_ms(calm_from_s, crowd_from_s),
            readers.median_gap_ms(began_s, gone_s),
            result["seconds"],
            streams,
        )
    finally:
        for task in reading:
            task.cancel()
        for task in reading:
            with suppress(asyncio.CancelledError, OSError):
                await task


def run(
    model: Path, size: int = SIZE, calm_s: float = CALM_S, *flags: str, streams: int = STREAMS
) -> Outcome:
    """Of a server of its own."""
    command = (QUIRE, "serve", str(model), "--port", "0", "--log-level", "info", *flags)
    with serving(*command) as process:
        return asyncio.run(measure(process.port, size, calm_s, streams))


def main() -> int:
    """The command; with a port it is the crowd alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/demo/model")
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--port", type=int)
    asked = parser.parse_args()
    if asked.port is not None:
        started_s = time.monotonic()
        data = chat_request("Hello there.", max_tokens=ANSWER_TOKENS).replace(
            b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n"
        )
        endings = asyncio.run(crowd(asked.port, asked.size, data, MAX_CROWD_S))
        outcomes = Counter(map(outcome_of, endings))
        print(json.dumps({"outcomes": outcomes, "seconds": time.monotonic() - started_s}))
        return 0
    return max(judge(asked.model, asked.size, streams) for streams in (STREAMS, FEW_STREAMS))


def judge(model: Path, size: int, streams: int) -> int:
    """Runs and prints; the command's exit code. What others do on the machine can only slow the
    streams down, so that one run in which they are fast enough is enough."""
    for _ in range(MOST_RUNS):
        outcome = run(model, size, streams=streams)
        problems: Sequence[str] = outcome.problems()
        print("\n".join([*outcome.lines(), *problems]), flush=True)
        if not outcome.only_slow:
            break
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
