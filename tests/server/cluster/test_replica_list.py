"""The replicas as people see them."""

from dataclasses import fields, replace

from engine.types import EngineLimits, EngineStats, KVStats
from server.cluster.membership import Membership, listed
from server.cluster.messages import ReplicaReport
from server.metrics.replica_figures import ReplicaFigures

LIMITS = EngineLimits(100, 4, 10)


def pool(block_bytes: int, free: int, cached: int, total: int) -> KVStats:
    figures = {field.name: 0 for field in fields(KVStats) if field.name != "cells"}
    sizes = {"free": free, "cached": cached, "capacity": total}
    figures |= {f"{name}_bytes": blocks * block_bytes for name, blocks in sizes.items()}
    return KVStats(**figures | {"block_bytes": block_bytes})  # type: ignore[arg-type]


def test_each_replica_is_as_it_said_last_and_whether_it_answers() -> None:
    now = 100.0
    members = Membership(silence_s=5.0, clock=lambda: now)
    stats = EngineStats(
        running=2,
        waiting=1,
        submitted_prompt_tokens=50,
        cached_prompt_tokens=40,
        generated_tokens=7,
        kv=pool(4096, free=3, cached=5, total=16),
    )
    report = ReplicaReport("b", "there", LIMITS, stats, 8, 0.0, 0)
    members.hear(replace(report, name="c", host="here", stats=EngineStats()))
    now += 6.0
    members.hear(report)
    now += 0.5
    members.set_names(("c", "b", "a"))
    assert listed(members) == [
        ReplicaFigures("a", None, "starting", None),
        ReplicaFigures("b", "there", "up", 0.5, 2, 1, 8, 3, 5, 16, 50, 40, 7),
        ReplicaFigures("c", "here", "silent", 6.5, capacity=8),
    ]
    members.lose("b")
    assert [its.state for its in listed(members)] == ["starting", "silent", "silent"]
    members.set_names(("b",))
    assert [its.name for its in listed(members)] == ["b"]
