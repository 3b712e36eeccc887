"""What every limit lets a body take, at half of it and at all of it.

A server for each kind of model is watched from outside while it reads a body of n, of 2n, which is
the limit, and one beyond that. What grows by much more than its size, takes much memory for each
byte, or is not refused at once beyond the limit, is a finding; it must show three times.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.abuse.clients import request
from tests.abuse.limit_rows import Row, rows
from tests.abuse.processes import serving
from tests.abuse.soak import DEMO
from tests.clients.servers import QUIRE
from tests.fuzz.hunt import ALLOCATOR, SETTINGS
from tests.fuzz.judgement import MEMORY_FACTOR, MEMORY_FLOOR_BYTES, MIB
from tests.fuzz.target import WARM_UP, ask
from tests.fuzz.watch import CLOSE, Watch

ANSWER_LIMIT_S = 120.0
"""What takes long is to be seen."""
SLOW_S = 2.0
"""What takes as long is no chance of a busy machine, and is sent once."""
GROWTH = 3.0
CPU_FLOOR_S, GROWTH_FLOOR_BYTES = 0.2, 32 * MIB
"""What is less at n counts as so much. A form that takes longer than 0.1 s is judged twice."""
REFUSAL_LIMIT_S = 0.5
CONTEXT = 4096
MARKS = ("bcd", "efg", "hij")
"""One for each time; the best of three counts: others use the machine, too."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one body.

    cpu_s: of the server with its children: what grows is judged by it, because others use the
    machine, too. gap_s: the longest time without an answer of GET /health.
    """

    n: int
    body_bytes: int
    status: int | None
    said: bytes
    seconds: float
    cpu_s: float
    peak_bytes: int
    gap_s: float

    @property
    def allowed_bytes(self) -> float:
        """At the peak."""
        return MEMORY_FLOOR_BYTES + MEMORY_FACTOR * self.body_bytes


class Server:
    """A running server with its watch."""

    def __init__(self, port: int, pid: int, watch: Watch) -> None:
        self._port, self._pid, self._watch = port, pid, watch

    def cost(self, row: Row, n: int, marks: str) -> Cost:
        """The least of several times, figure by figure."""
        costs = [self._once(row, n, marks[0])]
        for mark in marks[1:]:
            if costs[-1].seconds < SLOW_S:
                costs.append(self._once(row, n, mark))
        return Cost(
            n,
            costs[0].body_bytes,
            costs[0].status,
            costs[0].said,
            min(cost.seconds for cost in costs),
            min(cost.cpu_s for cost in costs),
            min(cost.peak_bytes for cost in costs),
            min(cost.gap_s for cost in costs),
        )

    def _once(self, row: Row, n: int, mark: str) -> Cost:
        data = row.request(n, mark)
        now_s = time.monotonic()
        before = self._watch.between(now_s, now_s).last_bytes
        own = self._memory("VmRSS")
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        began_s, cpu_s = time.monotonic(), self._cpu_s()
        answer = ask(self._port, data, ANSWER_LIMIT_S)
        cpu_s = self._cpu_s() - cpu_s
        seen = self._watch.between(began_s, time.monotonic())
        # The process's own peak misses nothing; its children are looked at now and then.
        peak = max(self._memory("VmHWM") - own, seen.peak_bytes - before)
        gap_s = max(seen.health_gap_s - seen.own_gap_s, 0.0)
        return Cost(n, len(data), answer.status, answer.said, answer.seconds, cpu_s, peak, gap_s)

    def _cpu_s(self) -> float:
        """Processor time so far, of children that have ended, too."""
        server = psutil.Process(self._pid)
        used = 0.0
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:4])
        return used

    def _memory(self, name: str) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        found = re.search(rf"{name}:\s*(\d+) kB", status)
        assert found
        return int(found[1]) * 1024


@contextmanager
def watched(quire: Path, embeds: bool) -> Iterator[Server]:
    """A server of the demo model; embeds: it makes vectors."""
    settings = [f"--set={one}" for one in (*SETTINGS, f"engine.max_model_len={CONTEXT}")]
    settings += ["--set=engine.task=embed"] if embeds else []
    with serving(DEMO, *settings, quire=("env", *ALLOCATOR, quire)) as process:
        port, pid = process.port, process.process.pid
        for path, body in WARM_UP:
            ask(port, request("POST", path, CLOSE, json.dumps(body).encode()))
        watch = Watch(port, pid, 0)
        try:
            watch.calm()
            yield Server(port, pid, watch)
        finally:
            watch.close()


def problems(costs: Sequence[Cost], refusal: int) -> list[str]:
    """What must not be, of a body at half of a limit, at the limit, and beyond it.

    Fewer costs: the last one had no answer.
    """
    if len(costs) < 3 or None in {cost.status for cost in costs}:
        return ["NO ANSWER"]
    half, whole, beyond = costs
    found = []
    if whole.cpu_s > GROWTH * max(half.cpu_s, CPU_FLOOR_S):
        found.append("TIME GROWS")
    if whole.peak_bytes > GROWTH * max(half.peak_bytes, GROWTH_FLOOR_BYTES):
        found.append("MEMORY GROWS")
    if any(cost.peak_bytes > cost.allowed_bytes for cost in costs):
        found.append("MUCH MEMORY")
    if any(cost.status is not None and cost.status >= 500 for cost in costs):
        found.append("SERVER ERROR")
    if beyond.status != refusal or (whole.status, whole.said) == (beyond.status, beyond.said):
        found.append("NOT REFUSED")
    if beyond.seconds > REFUSAL_LIMIT_S:
        found.append("REFUSED LATE")
    return found


HEAD = (
    f"{'limit, path, body':62} {'2n':>9} {'unit':8} {'answers':11} "
    f"{'time at n, 2n, beyond, s':>24} {'processor, s':>14} {'peak, MiB':>14} {'gap, s':>6}"
)


def line(row: Row, costs: Sequence[Cost], found: Sequence[str]) -> str:
    """A row with its figures."""
    statuses = " ".join(str(cost.status) for cost in costs)
    times = " ".join(f"{cost.seconds:7.3f}" for cost in costs)
    cpu = " ".join(f"{cost.cpu_s:6.2f}" for cost in costs[:2])
    peaks = " ".join(f"{cost.peak_bytes / MIB:6.0f}" for cost in costs[:2])
    gap_s = max(cost.gap_s for cost in costs)
    told = (
        f"{row.name:62} {row.most:>9} {row.unit:8} {statuses:11} {times:>24} {cpu:>14} {peaks:>14}"
    )
    return f"{told} {gap_s:6.2f}  {', '.join(found)}".rstrip()


def measured(server: Server, row: Row) -> tuple[list[Cost], list[str]]:
    """The costs, and what was found every time."""
    for marks in MARKS:
        costs: list[Cost] = []
        for n in (row.most // 2, row.most, row.most + row.grain):
            costs.append(server.cost(row, n, marks))
            if costs[-1].status is None:
                break
        found = problems(costs, row.refusal)
        if not found or max(cost.seconds for cost in costs) > SLOW_S:
            break
    return costs, found


def run(quire: Path, waiting: list[Row], embeds: bool) -> int:
    """How many of them had findings. A server is not asked again then: it may be busy still, or
    have memory that the next body needs not take."""
    count = 0
    while waiting:
        with watched(quire, embeds) as server:
            found: list[str] = []
            while waiting and not found:
                row = waiting.pop(0)
                costs, found = measured(server, row)
                count += bool(found)
                print(line(row, costs, found), flush=True)
    return count


def main() -> int:
    """1 where something was found."""
    parser = argparse.ArgumentParser(description="Time and memory at every limit.")
    parser.add_argument("--quire", type=Path, default=Path(QUIRE), help="the command")
    parser.add_argument("--only", default="", help="rows with that in their names")
    asked = parser.parse_args()
    # What was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(HEAD, flush=True)
    wanted = [row for row in rows(CONTEXT) if asked.only in row.name]
    count = sum(
        run(asked.quire, [row for row in wanted if row.embeds == embeds], embeds)
        for embeds in (False, True)
    )
    print(f"{len(wanted)} rows, {count} with findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
