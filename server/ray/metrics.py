"""Metrics of each replica, beside the sums that the front shows under an engine's names."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.types import EngineStats
from server.metrics.families import counter, counters, gauge, gauges
from server.ray.remote_engine import RemoteEngine

LABELS = ("replica", "host")


class ClusterCollector(Collector):
    """Collect how the replicas are."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        members = self._engine.members
        alive = {report.name for report in members.alive}
        reports = members.reports
        yield gauge(
            "quire_replicas", "Replicas that there are, whether they answer or not", len(reports)
        )
        yield gauges(
            "quire_replica_up_ratio",
            "1 while the replica says how it is, 0 when it is silent; one that is gone has none",
            LABELS,
            [((its.name, its.host), float(its.name in alive)) for its in reports],
        )
        yield counter(
            "quire_replica_retries",
            "Prompts that were given to another replica because one was silent, gone or full",
            self._engine.retries,
        )
        for name, documentation in GAUGES.items():
            yield gauges(
                f"quire_replica_requests_{name}",
                documentation,
                LABELS,
                [((its.name, its.host), float(getattr(its.stats, name))) for its in reports],
            )
        for name, (field, documentation) in COUNTERS.items():
            yield counters(
                f"quire_replica_{name}",
                documentation,
                LABELS,
                [((its.name, its.host), _count(its.stats, field)) for its in reports],
            )


GAUGES = {
    "running": "Sequences that the replica has admitted",
    "waiting": "Sequences that wait for admission at the replica",
}
COUNTERS = {
    "prompt_tokens": ("submitted_prompt_tokens", "Prompt tokens that the replica was given"),
    "cached_prompt_tokens": ("cached_prompt_tokens", "Those that its cache had"),
    "generated_tokens": ("generated_tokens", "Tokens that the replica has generated"),
}


def _count(stats: EngineStats, field: str) -> float:
    return float(getattr(stats, field))
