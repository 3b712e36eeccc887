"""Who the replicas are, and how they were when they said so last."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from engine.types import CellStats, Distributions, EngineStats, HistogramCounts, KVStats, MissReason
from engine.types import MlxMemory as MlxMemory
from server.metrics.replica_figures import ReplicaFigures
from server.ray.messages import ReplicaReport

# What is of the newest step, and no sum.
NO_SUMS = ("token_budget", "step_seconds")
# What ends with its engine; all else counts what has happened.
OF_THE_MOMENT = ("running", "waiting", "token_budget", "step_seconds", "mlx", "kv")
SAME_IN_ALL = ("block_bytes", "block_tokens", "cells")


def ended(stats: EngineStats) -> EngineStats:
    """Return what is left of an engine that is gone: its counters."""
    nothing = EngineStats()
    return replace(stats, **{name: getattr(nothing, name) for name in OF_THE_MOMENT})


def merged(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums; of what is no sum the largest."""
    if not all_stats:
        return EngineStats()
    sums = {
        each.name: sum(getattr(stats, each.name) for stats in all_stats)
        for each in fields(EngineStats)
        if each.type in (int, float, "int", "float")
    }
    largest = {name: max(getattr(stats, name) for stats in all_stats) for name in NO_SUMS}
    return replace(
        EngineStats(),
        **sums | largest,
        prefix_misses=_misses(all_stats),
        measured=_measured([stats.measured for stats in all_stats]),
        mlx=MlxMemory(*map(sum, zip(*(stats.mlx for stats in all_stats), strict=True))),
        kv=_pool([stats.kv for stats in all_stats if stats.kv is not None]),
    )


def _misses(all_stats: Sequence[EngineStats]) -> tuple[tuple[MissReason, int], ...]:
    counts = Counter[MissReason]()
    for stats in all_stats:
        counts.update(dict(stats.prefix_misses))
    return tuple(counts.items())


def _measured(all_measured: Sequence[Distributions]) -> Distributions:
    return Distributions(*(_histogram(same) for same in zip(*all_measured, strict=True)))


def _histogram(same: Sequence[HistogramCounts]) -> HistogramCounts:
    counts = tuple(map(sum, zip(*(its.counts for its in same), strict=True)))
    return HistogramCounts(same[0].bounds, counts, sum(its.total for its in same))


def _pool(pools: Sequence[KVStats]) -> KVStats | None:
    if not pools:
        return None
    sums = {
        each.name: sum(getattr(pool, each.name) for pool in pools)
        for each in fields(KVStats)
        if each.name not in SAME_IN_ALL
    }
    return replace(pools[0], **sums, cells=_cells([pool.cells for pool in pools]))


def _cells(pools: Sequence[CellStats]) -> CellStats:
    cached = Counter[str]()
    for pool in pools:
        cached.update(dict(pool.cached))
    sums = {
        each.name: sum(getattr(pool, each.name) for pool in pools)
        for each in fields(CellStats)
        if each.name not in ("cached", "cell_bytes")
    }
    return replace(pools[0], **sums, cached=tuple(cached.items()))


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
        """Counters of those that there are no more."""

    def set_names(self, names: Sequence[str]) -> None:
        """Note who there is."""
        self.names = tuple(names)
        for name in self._reports.keys() - set(names):
            # What it has counted since its last word is not known any more.
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
        """Note that a replica has not answered; it is asked nothing until it says how it is."""
        self._lost.add(name)

    @property
    def silent(self) -> frozenset[str]:
        """Return those that do not answer."""
        alive = {report.name for report in self.alive}
        return frozenset(name for name in self._reports if name not in alive) | self._lost

    def others(self, without: frozenset[str]) -> bool:
        """Return whether there are other replicas than these."""
        return not without.issuperset(self.names)

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

    def age_s(self, name: str) -> float:
        """Return how old the newest report of a replica is."""
        return self._clock() - self._reports[name][0]

    @property
    def telling(self) -> list[ReplicaReport]:
        """Return reports of what the replicas are like: where there is none left, the last one."""
        return self.reports or ([] if self._last is None else [self._last])

    @property
    def stats(self) -> EngineStats:
        """Return the sums of all that there have been."""
        return merged([self._gone, *(report.stats for report in self.reports)])


def listed(members: Membership) -> list[ReplicaFigures]:
    """Return the figures of all replicas that there are, by their names."""
    alive = {report.name for report in members.alive}
    said = {report.name: report for report in members.reports}
    return [
        _figures(said[name], members.age_s(name), is_up=name in alive)
        if name in said
        else ReplicaFigures(name, None, "starting", None)
        for name in sorted(members.names)
    ]


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
