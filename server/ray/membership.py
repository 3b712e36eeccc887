"""The replicas, and how each was when it said so last."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

from engine.types import EngineStats
from server.ray.messages import ReplicaReport
from server.routes.service import ReplicaFigures

# Fields of statistics that end with their engine; all others count what has happened.
OF_THE_MOMENT = ("running", "waiting", "token_budget", "step_seconds", "mlx", "kv")
# Fields that are no sums: of the newest step, of which the largest is shown; and equal in all.
LARGEST = ("token_budget", "step_seconds")
EQUAL = ("bounds", "block_bytes", "block_tokens", "cell_bytes")
# Pairs of a name and a number.
COUNTS = ("prefix_misses", "cached")


def ended(stats: EngineStats) -> EngineStats:
    """Return what is left of an engine that is gone: its counters."""
    nothing = EngineStats()
    return replace(stats, **{name: getattr(nothing, name) for name in OF_THE_MOMENT})


def merged(all_stats: Sequence[EngineStats]) -> EngineStats:
    def both(one: EngineStats, other: EngineStats) -> EngineStats:
        return EngineStats(**_merged_fields(one, other))

    return reduce(both, all_stats, EngineStats())


def _merged_fields(one: Any, other: Any) -> dict[str, Any]:
    names = getattr(one, "_fields", None) or [each.name for each in fields(one)]
    return {name: _merged(name, getattr(one, name), getattr(other, name)) for name in names}


def _merged(name: str, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if name in EQUAL:
        return one
    if isinstance(one, int | float):
        return max(one, other) if name in LARGEST else one + other
    if name in COUNTS:
        sums = Counter(dict(one))
        sums.update(dict(other))
        return tuple(sums.items())
    if name == "counts":
        return tuple(map(add, one, other))
    return type(one)(**_merged_fields(one, other))


class Membership:
    """The replicas of a cluster."""

    def __init__(self, silence_s: float, clock: Callable[[], float]) -> None:
        """silence_s: for how long a report says that its replica is alive. clock: seconds."""
        self._silence_s = silence_s
        self._clock = clock
        self.names: tuple[str, ...] = ()
        """Those that there are, whether they answer or not."""
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._last: ReplicaReport | None = None
        self._lost: set[str] = set()
        self._gone = EngineStats()
        """Counters of those that there are no more, as of their last reports."""

    def set_names(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        for name in self._reports.keys() - set(names):
            _, report = self._reports.pop(name)
            self._gone = merged([self._gone, ended(report.stats)])
        self._lost &= set(names)

    @property
    def unheard(self) -> list[str]:
        """Return those that have never said how they are."""
        return [name for name in self.names if name not in self._reports]

    def hear(self, report: ReplicaReport) -> None:
        """Take a report in: its replica answers."""
        if report.name not in self.names:
            self.names = (*self.names, report.name)
        self._reports[report.name] = self._clock(), report
        self._last = report
        self._lost.discard(report.name)

    def lose(self, name: str) -> None:
        """Note that a replica has not answered: it gets nothing until it reports again."""
        self._lost.add(name)

    @property
    def silent(self) -> frozenset[str]:
        """Return those that do not answer."""
        alive = {report.name for report in self.alive}
        return frozenset(name for name in self._reports if name not in alive) | self._lost

    @property
    def alive(self) -> list[ReplicaReport]:
        """Return the newest reports of those that answer."""
        since = self._clock() - self._silence_s
        return [
            report
            for name, (heard, report) in sorted(self._reports.items())
            if heard >= since and name not in self._lost
        ]

    @property
    def reports(self) -> list[ReplicaReport]:
        """Return the newest reports, also of those that are silent."""
        return [report for _, (_, report) in sorted(self._reports.items())]

    @property
    def telling(self) -> list[ReplicaReport]:
        """Return reports of what the replicas are like: where there is none left, the last one."""
        return self.reports or ([] if self._last is None else [self._last])

    @property
    def stats(self) -> EngineStats:
        """Return the sums of all that there have been."""
        return merged([self._gone, *(report.stats for report in self.reports)])

    def figures(self) -> list[ReplicaFigures]:
        """Return the figures of all replicas that there are, by their names."""
        found = []
        for name in sorted(self.names):
            if name in self._reports:
                heard, report = self._reports[name]
                is_up = name not in self.silent
                found.append(_figures(report, self._clock() - heard, is_up=is_up))
            else:
                found.append(ReplicaFigures(name, None, "starting", None))
        return found


def _figures(report: ReplicaReport, age_s: float, *, is_up: bool) -> ReplicaFigures:
    stats = report.stats
    free = cached = total = 0
    if (kv := stats.kv) is not None:
        sizes = (kv.free_bytes, kv.cached_bytes, kv.capacity_bytes)
        free, cached, total = (size // kv.block_bytes for size in sizes)
    return ReplicaFigures(
        report.name,
        report.host,
        "up" if is_up else "silent",
        round(age_s, 3),
        stats.running,
        stats.waiting,
        report.capacity,
        free,
        cached,
        total,
        stats.submitted_prompt_tokens,
        stats.cached_prompt_tokens,
        stats.generated_tokens,
    )
