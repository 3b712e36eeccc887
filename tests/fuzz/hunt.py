"""Sends families to a server, size by size, until something is found."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from server.text.grammar.worker import SLOW_WALL_S
from tests.fuzz.bodies import Family
from tests.fuzz.judgement import MIB, Answer, Problems, is_status, kept, problems, squared
from tests.fuzz.target import Target, ask

AT_ONCE_S = 0.05
"""An answer that comes sooner cannot have held up anybody for long."""
FEW = 8
"""Answers that came at once, after which the watch is asked all the same."""
KEPT_LIMIT_S, KEPT_POLL_S = 5.0, 0.1
"""So long a server may take to give memory back."""
LOST = {"died", "not back", "no answer"}
"""Kinds of findings after which a server is not asked again."""
TOLD_BYTES = 200
SETTINGS = (
    # What may be kept is small, so that what is taken beyond it is seen; one processor is left
    # to the watch.
    *("cache.kv_budget=32MiB", "cache.heap_size=4MiB", "cache.free_slack=4MiB"),
    *("cache.prefix_keep_s=1", "cache.idle_release_s=1", "limits.max_cached_grammars=1"),
    *("engine.mlx_cache_bytes=32MiB", "engine.threads=1", "log.requests=false"),
)
ALLOCATOR = ("MALLOC_ARENA_MAX=1", "MALLOC_TRIM_THRESHOLD_=131072", "MALLOC_MMAP_THRESHOLD_=131072")
"""glibc gives memory back when it is free: what stays is the server's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A family, and the smallest size that showed something every time."""

    family: Family
    n: int
    data: bytes
    found_s: float
    """Since the run began."""
    problems: Problems

    def __str__(self) -> str:
        what = "; ".join(f"{kind} {figures}" for kind, figures in self.problems.items())
        figures = f"{self.found_s:7.0f} s  n={self.n:<10} {len(self.data):>9,} B  {what}"
        return f"{figures}\n{'':11}{self.family.name!r}"


@dataclass
class Hunt:
    """One run against one target."""

    target: Target
    save: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    unconfirmed: Counter[str] = field(default_factory=Counter)
    """What was seen once, and not again."""
    tried: int = 0
    sent_bytes: int = 0
    _begun_s: float = field(default_factory=time.monotonic)
    _looked_s: float = field(default_factory=time.monotonic)
    _is_over: bool = False

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._begun_s

    def run(self, families: Iterable[Family], until_s: float) -> None:
        """Tries them until the time is over."""
        for one in families:
            if self._is_over or self.seconds > until_s:
                break
            self._try(one)
            self.tried += 1
            if self.tried % 100 == 0:
                print(f"{self.seconds:7.0f} s  {self.tried} families", flush=True)

    def end(self, *_: object) -> None:
        """Makes the family that is tried now the last one; for signals."""
        self._is_over = True

    def _try(self, family: Family) -> None:
        """Doubles its size up to a finding, or to the limit."""
        times_s: list[float] = []
        at_once = 0
        for n, data in family.sizes():
            answer, found = self.send(family, data, look=at_once >= FEW)
            times_s.append(answer.seconds)
            at_once = at_once + 1 if answer.seconds < AT_ONCE_S and at_once < FEW else 0
            found |= squared(times_s, deadline_s(family))
            if found and self._confirm(family, n, found):
                return
        if found := self._kept():
            self._confirm(family, n, found)

    def send(self, family: Family, data: bytes, *, look: bool) -> tuple[Answer, Problems]:
        """One request, and what must not be. look: also where the answer comes at once."""
        answer = ask(self.target.port, family.request(data))
        until_s = time.monotonic()
        self.sent_bytes += len(data)
        self.statuses[str(answer.status)] += 1
        if words := self.target.last_words:
            return answer, {"died": words}
        seen = None
        if look or answer.seconds > AT_ONCE_S:
            seen = self.target.watch.between(self._looked_s, until_s)
            self._looked_s = until_s
        return answer, problems(answer, seen, self.target.calm, len(data))

    def _confirm(self, family: Family, n: int, found: Problems) -> bool:
        """Tries again, twice; only what is seen every time counts.

        Once at the next smaller size, which is not in any cache; then on a new server, where it is
        not the doing of what was sent before. A status is none in any case.
        """
        for size in (n - 1, n):
            if LOST & found.keys() or (size == n and not all(map(is_status, found))):
                self._restart()
            else:
                self.target.look_at_calm()
                self._looked_s = time.monotonic()
            again = self._again(family, size, found)
            self.unconfirmed.update(found.keys() - again.keys())
            found = {kind: figures for kind, figures in again.items() if kind in found}
            if not found:
                return False
        data = family.data(n)
        finding = Finding(family, n, data, self.seconds, found)
        self.findings.append(finding)
        told = f"{finding}\n{'':11}{data[:TOLD_BYTES]!r}"
        print(told, flush=True)
        if self.save:
            self.save.mkdir(parents=True, exist_ok=True)
            place = self.save / f"{len(self.findings):04}"
            place.with_suffix(".body").write_bytes(data)
            place.with_suffix(".txt").write_text(told)
        return True

    def _again(self, family: Family, n: int, found: Problems) -> Problems:
        sizes = (n // 4, n // 2, n) if "time" in found else (n,)
        answers = [self.send(family, family.data(size), look=True) for size in sizes]
        times_s = [answer.seconds for answer, _ in answers]
        again = answers[-1][1] | squared(times_s, deadline_s(family))
        if LOST & again.keys():
            self._restart()
        elif "memory kept" in found:
            again |= self._kept()
        return again

    def _kept(self) -> Problems:
        """Memory that is not given back, even after a while."""
        until_s = time.monotonic() + KEPT_LIMIT_S
        while True:
            now_s = time.monotonic()
            found = kept(self.target.watch.between(now_s, now_s), self.target.calm)
            if not found or now_s > until_s:
                return found
            time.sleep(KEPT_POLL_S)

    def _restart(self) -> None:
        self.target.restart()
        self._looked_s = time.monotonic()

    def table(self) -> str:
        """All findings by their first kinds, and the counts."""
        lines = []
        first = {id(one): next(iter(one.problems)) for one in self.findings}
        for kind, count in Counter(first.values()).most_common():
            rows = [one for one in self.findings if first[id(one)] == kind]
            rows.sort(key=lambda one: (one.family.group, one.family.path, one.n))
            lines += [f"\n{kind}: {count} families", *map(str, rows)]
        statuses = ", ".join(f"{count:,} {status}" for status, count in self.statuses.items())
        lines += [
            f"\n{statuses}; {self.sent_bytes / MIB:,.0f} MiB sent, {self.target.starts} servers",
            f"seen, but not every time: {dict(self.unconfirmed)}",
            f"{self.tried} families in {self.seconds:.0f} s, {len(self.findings)} findings",
        ]
        return "\n".join(lines)


def deadline_s(family: Family) -> float:
    """Return the time after which the server gives up a family's requests. llguidance takes a time
    that grows with the cube of a grammar's alternatives, in a worker with this deadline."""
    return SLOW_WALL_S if "guided_grammar" in family.name else 0.0
