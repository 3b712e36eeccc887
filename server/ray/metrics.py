"""Metrics of each replica, beside the sums that the front shows under an engine's names."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.metrics.families import counter, counters, gauge, gauges
from server.ray.remote_engine import RemoteEngine

LABELS = ("replica", "host")
GAUGES = {
    "quire_replica_requests_running": ("running", "Sequences that the replica has admitted"),
    "quire_replica_requests_waiting": (
        "waiting",
        "Sequences that wait for admission at the replica",
    ),
}
COUNTERS = {
    "quire_replica_prompt_tokens": (
        "submitted_prompt_tokens",
        "Prompt tokens that the replica was given",
    ),
    "quire_replica_cached_prompt_tokens": ("cached_prompt_tokens", "Those that its cache had"),
    "quire_replica_generated_tokens": (
        "generated_tokens",
        "Tokens that the replica has generated",
    ),
}


class ClusterCollector(Collector):
    """Collect how the replicas are."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        silent, reports = self._engine.members.silent, self._engine.members.reports
        yield gauge(
            "quire_replicas", "Replicas that there are, whether they answer or not", len(reports)
        )
        yield gauges(
            "quire_replica_up_ratio",
            "1 while the replica says how it is, 0 when it is silent; one that is gone has none",
            LABELS,
            [((its.name, its.host), float(its.name not in silent)) for its in reports],
        )
        yield counter(
            "quire_replica_retries",
            "Prompts that were given to another replica because one was silent, gone or full",
            self._engine.retries,
        )
        for family, table in ((gauges, GAUGES), (counters, COUNTERS)):
            for name, (field, documentation) in table.items():
                values = [
                    ((its.name, its.host), float(getattr(its.stats, field))) for its in reports
                ]
                yield family(name, documentation, LABELS, values)
