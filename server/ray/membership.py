"""Stores the last report (state) of each replica, and adds up the engines' statistics."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.types import EngineStats
from server.metrics.families import counter, counters, gauge, gauges
from server.protocol.answers import Json
from server.ray.replica_calls import ReplicaReport

# Fields of EngineStats that describe a running engine. All other fields count events.
MOMENTARY = ("running", "waiting", "token_budget", "step_seconds", "drafting", "mlx", "kv")
# The same of EngineStats.disk.
MOMENTARY_DISK = ("held_bytes", "limit_bytes", "pending_writes", "waiting_reads")
# Fields about an engine's newest steps. Merged statistics contain the largest value, not the sum.
LARGEST = ("token_budget", "step_seconds", "drafting")
# Fields with constants that are equal in all replicas. Merging statistics does not add them.
EQUAL = ("bounds", "block_bytes", "block_tokens", "slot_bytes")
# Fields that count by name, as a Counter or as pairs.
COUNTS_BY_NAME = ("prefix_misses", "cached")


def merge_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    return reduce(_merge_fields, all_stats, EngineStats())


def _merge_fields(one: Any, other: Any) -> Any:
    names = getattr(one, "_fields", None) or [field.name for field in fields(one)]
    merged = {name: _merge(name, getattr(one, name), getattr(other, name)) for name in names}
    return type(one)(**merged)


def _merge(name: str, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if name in EQUAL:
        return one
    if isinstance(one, int | float):
        return max(one, other) if name in LARGEST else one + other
    if name in COUNTS_BY_NAME:
        sums = Counter(dict(one))
        sums.update(dict(other))
        return sums if isinstance(one, Counter) else tuple(sums.items())
    if name == "counts":
        return tuple(map(add, one, other))
    return _merge_fields(one, other)


def counters_of(stats: EngineStats) -> EngineStats:
    """Return statistics with only the fields that count events, for an engine that has ended."""
    empty = EngineStats()
    disk = replace(stats.disk, **dict.fromkeys(MOMENTARY_DISK, 0))
    return replace(stats, disk=disk, **{name: getattr(empty, name) for name in MOMENTARY})


class Membership:
    """The names of all replicas that Ray reports, and the last report of each replica."""

    def __init__(self, silence_s: float, clock: Callable[[], float]) -> None:
        """A replica counts as silent if its last report is older than ``silence_s`` seconds."""
        self._silence_s = silence_s
        self._clock = clock
        self.names: tuple[str, ...] = ()
        self.retries = 0
        """Number of times that a prompt was sent again because a replica was lost or full."""
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._newest: ReplicaReport | None = None
        self._lost: set[str] = set()
        self._gone = EngineStats()
        """The counters of all ended replicas, from their last reports."""

    def set_names(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        for name in self._reports.keys() - set(names):
            _, report = self._reports.pop(name)
            self._gone = merge_stats([self._gone, counters_of(report.stats)])
        self._lost &= set(names)

    def hear(self, report: ReplicaReport) -> None:
        if report.name not in self.names:
            self.names = (*self.names, report.name)
        self._reports[report.name] = self._clock(), report
        self._newest = report
        self._lost.discard(report.name)

    def lose(self, name: str) -> None:
        """Record that a replica does not answer. It gets no prompts until its next report."""
        self._lost.add(name)

    @property
    def silent(self) -> frozenset[str]:
        alive = {report.name for report in self.alive}
        return frozenset(self._reports.keys() - alive) | self._lost

    @property
    def alive(self) -> list[ReplicaReport]:
        """The last report of each replica that is not silent."""
        since = self._clock() - self._silence_s
        return [
            report
            for name, (heard, report) in sorted(self._reports.items())
            if heard >= since and name not in self._lost
        ]

    @property
    def reports(self) -> list[ReplicaReport]:
        """The last report of each replica, silent or not."""
        return [report for _, (_, report) in sorted(self._reports.items())]

    @property
    def limiting_reports(self) -> list[ReplicaReport]:
        """The reports that limit requests: all, or the last one received if no replica is left."""
        return self.reports or ([] if self._newest is None else [self._newest])

    @property
    def stats(self) -> EngineStats:
        return merge_stats([self._gone, *(report.stats for report in self.reports)])

    def figures(self) -> list[Json]:
        """Return what GET /cluster/replicas lists. Without a report, a replica's counts are 0."""
        silent, now, rows = self.silent, self._clock(), list[Json]()
        for name in sorted(self.names):
            heard, report = self._reports.get(name, (now, None))
            stats = EngineStats() if report is None else report.stats
            blocks: tuple[int, ...] = (0, 0, 0)
            if (kv := stats.kv) is not None:
                free = kv.capacity_tokens - kv.used_tokens - kv.cached_tokens
                tokens = free, kv.cached_tokens, kv.capacity_tokens
                blocks = tuple(count // kv.block_tokens for count in tokens)
            state = "silent" if name in silent else "up"
            rows.append(
                {
                    "name": name,
                    "host": None if report is None else report.host,
                    "state": "starting" if report is None else state,
                    "heard_s_ago": None if report is None else round(now - heard, 3),
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "capacity": 0 if report is None else report.capacity,
                    **dict(
                        zip(("free_blocks", "cached_blocks", "total_blocks"), blocks, strict=True)
                    ),
                    "prompt_tokens": stats.submitted_prompt_tokens,
                    "cached_tokens": stats.cached_prompt_tokens,
                    "generated_tokens": stats.generated_tokens,
                }
            )
        return rows


# ``{name of a metric with one value per replica: (maker, field of EngineStats)}``.
OF_EACH_REPLICA = {
    "quire_replica_requests_running": (gauges, "running"),
    "quire_replica_requests_waiting": (gauges, "waiting"),
    "quire_replica_prompt_tokens_total": (counters, "submitted_prompt_tokens"),
    "quire_replica_cached_prompt_tokens_total": (counters, "cached_prompt_tokens"),
    "quire_replica_generated_tokens_total": (counters, "generated_tokens"),
}


class ReplicasCollector(Collector):
    """Collects the Prometheus metrics about single replicas of a cluster."""

    def __init__(self, members: Membership) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        silent, reports = self._members.silent, self._members.reports
        labels, rows = ("replica", "host"), [(each.name, each.host) for each in reports]
        yield gauge("quire_replicas", len(reports))
        yield counter("quire_replica_retries_total", self._members.retries)
        up = [(row, float(row[0] not in silent)) for row in rows]
        yield gauges("quire_replica_up_ratio", labels, up)
        for name, (make, field) in OF_EACH_REPLICA.items():
            values = [float(getattr(report.stats, field)) for report in reports]
            yield make(name, labels, zip(rows, values, strict=True))
