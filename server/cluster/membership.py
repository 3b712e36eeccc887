"""Who the replicas are, and how they were when they said so last."""

from collections.abc import Callable, Sequence

from engine.types import EngineStats
from server.cluster.merged_stats import ended, merged
from server.cluster.messages import ReplicaReport


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
