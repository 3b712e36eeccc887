"""Metrics of replicas."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from engine.types import EngineLimits, EngineStats
from server.ray.messages import ReplicaReport
from server.ray.metrics import ClusterCollector
from server.ray.remote_engine import RemoteEngine
from tests.server.ray.local_replicas import LocalReplicas


async def test_each_replica_has_its_figures() -> None:
    replicas = LocalReplicas(0)
    engine = RemoteEngine(replicas, max_backlog=1)
    busy = EngineStats(running=2, waiting=1, submitted_prompt_tokens=50, generated_tokens=7)
    report = ReplicaReport("a", "here", EngineLimits(100, 4, 10), busy, 8, 0.0, 0)
    engine.members.hear(report)
    engine.members.hear(replace(report, name="b"))
    engine.members.lose("b")
    registry = CollectorRegistry()
    registry.register(ClusterCollector(engine))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("quire_replicas") == 2
    assert value("quire_replica_up_ratio", replica="a", host="here") == 1
    assert value("quire_replica_up_ratio", replica="b", host="here") == 0
    assert value("quire_replica_requests_running", replica="a", host="here") == 2
    assert value("quire_replica_generated_tokens_total", replica="a", host="here") == 7
    assert value("quire_replica_retries_total") == 0
