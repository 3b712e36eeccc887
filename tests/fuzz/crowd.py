"""Thousands of hostile bodies beside honest streams, and as many ordinary ones to compare with."""

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from tests.abuse.clients import request
from tests.fuzz.bodies import FIRST_SIZE, ORDINARY, Family
from tests.fuzz.judgement import GAP_FLOOR_S, MIB, Answer, Figures, Problems, problems
from tests.fuzz.target import Target, ask
from tests.fuzz.watch import CLOSE

CLIENTS, STREAMS = 32, 16
MAX_BYTES = 2**20
"""Of one of the bodies, so that all of them can be sent."""
MOST_DOUBLINGS = 16
SETTINGS = ("cache.prefix_keep_s=1", "cache.idle_release_s=1", "log.requests=false")
WARM_UP = 200
"""Ordinary bodies before the memory is looked at."""
REST_S, IDLE_S = 35.0, 120.0
"""Before the memory is looked at: before the crowd, and after it. An idle server gives back what it
keeps at looks of its own, so that it has had two of them."""
MAX_GAP_RATIO, MAX_KEPT_RATIO = 2.0, 1.1
MAX_STALL_RATIO = 4.0
"""Of a stream's longest gap: who looks for longer sees longer ones, as beside hostile bodies."""
SMOOTH_GAP_S = 0.05
"""Who gets a token this often reads on without noticing."""
Drawn = Callable[[int], bytes]
"""A request, by its number."""
Start = Callable[[int], Target]
"""Of a server of its own, by how many streams there are."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one crowd."""

    statuses: Counter[int | None]
    seconds: float
    seen: Figures
    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        peak = max(self.seen.peak_bytes, self.after_bytes)
        return (
            f"{statuses} in {self.seconds:.0f} s\n"
            f"  longest gap: /health {self.seen.health_gap_s:.2f} s, {STREAMS} streams "
            f"{self.seen.stream_gap_s:.2f} s, 99 % of them below {self.seen.stream_p99_s:.3f} s\n"
            f"  resident: {self.before_bytes / MIB:.0f} MiB before, {peak / MIB:.0f} at the peak, "
            f"{self.after_bytes / MIB:.0f} afterwards"
        )


def hostile(known: list[Family], seed: int) -> Drawn:
    """Bodies of any family and size; each group of families is drawn as often."""
    groups: dict[str, list[Family]] = {}
    for family in known:
        groups.setdefault(family.group, []).append(family)

    def drawn(number: int) -> bytes:
        draw = Random(seed * 10**6 + number)
        family = draw.choice(groups[draw.choice(sorted(groups))])
        n = FIRST_SIZE << draw.randint(0, MOST_DOUBLINGS)
        while len(data := family.data(n)) > min(MAX_BYTES, family.limit_bytes):
            n //= 2
        return family.request(data)

    return drawn


def ordinary(number: int) -> bytes:
    """A small valid request, to each route in turn."""
    path = list(ORDINARY)[number % len(ORDINARY)]
    body = json.dumps(ORDINARY[path]).replace("Hi", f"Hi {number}")
    return request("POST", path, CLOSE, body.encode())


def crowd(start: Start, drawn: Drawn, size: int) -> Outcome:
    """Sends so many to a server of its own, and lets it rest."""
    target = start(STREAMS)

    def send(drawn: Drawn, size: int) -> Counter[int | None]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            asked = clients.map(lambda number: ask(target.port, drawn(number)), range(size))
            return Counter(answer.status for answer in asked)

    def rested(seconds: float) -> int:
        target.watch.close()
        time.sleep(seconds)
        target.watch_with(0)
        return target.calm.last_bytes

    try:
        send(ordinary, WARM_UP)
        before_bytes = rested(REST_S)
        target.watch.close()
        target.watch_with(STREAMS)
        from_s = time.monotonic()
        statuses = send(drawn, size)
        until_s = time.monotonic()
        seen = target.watch.between(from_s, until_s)
        return Outcome(statuses, until_s - from_s, seen, before_bytes, rested(IDLE_S))
    finally:
        target.close()


def compare(start: Start, known: list[Family], size: int, seed: int) -> int:
    """Runs both crowds and prints what became of them; 1 where something must not be.

    What others do on the machine can make gaps longer, so that gaps must be seen twice.
    """
    for _ in range(2):
        plain = crowd(start, ordinary, size)
        print(f"ordinary: {plain}", flush=True)
        rude = crowd(start, hostile(known, seed), size)
        print(f"hostile: {rude}", flush=True)
        found = verdict(plain, rude)
        print("\n".join(f"NOT AS IT MUST BE: {kind} {figures}" for kind, figures in found.items()))
        if not all("gap" in kind for kind in found):
            break
    return 1 if found else 0


def verdict(plain: Outcome, rude: Outcome) -> Problems:
    """What must not be of hostile bodies, beside ordinary ones."""
    found: Problems = {}
    for status, count in rude.statuses.items():
        kinds = problems(Answer(status, 0.0), None, plain.seen, 0)
        found |= dict.fromkeys(kinds, f"{count} times")
    its, plains = rude.seen, plain.seen
    for kind, floor_s, ratio, gap_s, plain_s in (
        ("health gap", GAP_FLOOR_S, MAX_GAP_RATIO, its.health_gap_s, plains.health_gap_s),
        ("stream gap", GAP_FLOOR_S, MAX_STALL_RATIO, its.stream_gap_s, plains.stream_gap_s),
        ("99 % of gaps", SMOOTH_GAP_S, MAX_GAP_RATIO, its.stream_p99_s, plains.stream_p99_s),
    ):
        if gap_s > max(ratio * plain_s, floor_s):
            found[kind] = f"{gap_s:.2f} s, beside ordinary bodies {plain_s:.2f}"
    if not rude.seen.is_back:
        found["not back"] = ""
    if rude.after_bytes > MAX_KEPT_RATIO * rude.before_bytes:
        found["memory kept"] = f"+{(rude.after_bytes - rude.before_bytes) / MIB:.0f} MiB"
    return found
