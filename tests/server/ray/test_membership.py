"""Who the replicas are."""

from collections import Counter
from dataclasses import fields, replace

import pytest
from prometheus_client import CollectorRegistry

from engine.figures import Histogram
from engine.types import (
    Distributions,
    Drafting,
    EngineLimits,
    EngineStats,
    KVStats,
    MissReason,
    MlxMemory,
    SlotStats,
)
from kvcache.stats import NO_DISK, DiskStats
from server.ray.membership import Membership, ReplicasCollector, counters_of, merge_stats
from server.ray.replica_calls import ReplicaReport
from tests.simulation.runner import Clock

POOL = KVStats(
    **{name: 2 for name in KVStats.__dataclass_fields__ if name != "slots"},
    slots=SlotStats(4, 1, 1, (("kept", 2),), 0, 3, 100, 400),
)


def seen(value: float) -> Distributions:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    return Distributions(step_seconds=histogram.snapshot)


ONE = EngineStats(
    running=1,
    steps=10,
    drafted_tokens=6,
    accepted_tokens=4,
    token_budget=64,
    step_seconds=0.5,
    drafting=Drafting.RESTING,
    prefix_misses=Counter({MissReason.EVICTED: 2}),
    measured=seen(0.5),
    mlx=MlxMemory(1, 2, 3),
    disk=DiskStats(held_bytes=7, read_bytes=8),
    kv=POOL,
)


def test_counts_are_added_and_what_is_no_sum_is_the_largest() -> None:
    other = replace(ONE, token_budget=32, measured=seen(1.5), drafting=Drafting.OFF)
    both = merge_stats([ONE, other])
    assert (both.running, both.steps, both.token_budget, both.step_seconds) == (2, 20, 64, 0.5)
    assert (both.drafted_tokens, both.accepted_tokens) == (12, 8)
    assert both.drafting is Drafting.RESTING
    assert both.prefix_misses == {MissReason.EVICTED: 4}
    assert both.measured.step_seconds.counts == (1, 1, 0)
    assert both.measured.step_seconds.total == 2.0
    assert both.mlx == MlxMemory(2, 4, 6)
    assert both.disk == DiskStats(held_bytes=14, read_bytes=16)
    assert both.kv is not None
    assert (both.kv.free_bytes, both.kv.block_bytes) == (4, 2)
    assert both.kv.slots == SlotStats(8, 2, 2, (("kept", 4),), 0, 6, 100, 800)


def test_of_an_engine_that_is_gone_its_counters_are_left() -> None:
    left = counters_of(ONE)
    assert (left.steps, left.running, left.kv) == (10, 0, None)
    assert merge_stats([left]).steps == 10
    assert merge_stats([]) == EngineStats()


LIMITS = EngineLimits(100, 4, 10)


def test_each_replica_is_as_it_said_last_and_whether_it_answers() -> None:
    now = 100.0
    members = Membership(silence_s=5.0, clock=lambda: now)
    stats = EngineStats(
        running=2,
        waiting=1,
        submitted_prompt_tokens=50,
        cached_prompt_tokens=40,
        generated_tokens=7,
        kv=KVStats(block_tokens=16, capacity_tokens=256, used_tokens=128, cached_tokens=80),
    )
    report = ReplicaReport("b", "there", LIMITS, stats, 8, 0.0, 0)
    members.hear(replace(report, name="c", host="here", stats=EngineStats()))
    now += 6.0
    members.hear(report)
    now += 0.5
    members.set_names(("c", "b", "a"))
    assert [tuple(figures.values()) for figures in members.figures()] == [
        ("a", None, "starting", None, *[0] * 9),
        ("b", "there", "up", 0.5, 2, 1, 8, 3, 5, 16, 50, 40, 7),
        ("c", "here", "silent", 6.5, 0, 0, 8, *[0] * 6),
    ]
    members.lose("b")
    assert [figures["state"] for figures in members.figures()] == ["starting", "silent", "silent"]
    members.set_names(("b",))
    assert [figures["name"] for figures in members.figures()] == ["b"]


REPORT = ReplicaReport("a", "here", EngineLimits(100, 4, 10), EngineStats(), 8, 0.0, 0)


def test_counters_outlive_their_replica_and_figures_of_the_moment_do_not() -> None:
    members = Membership(5.0, Clock())
    busy = EngineStats(running=3, generated_tokens=100, steps=7)
    members.hear(replace(REPORT, stats=busy))
    members.hear(replace(REPORT, name="b", stats=busy))
    assert members.names == ("a", "b")
    assert members.stats.generated_tokens == 200
    assert members.stats.running == 6
    members.set_names(("b",))
    assert members.stats.generated_tokens == 200
    assert members.stats.steps == 14
    assert members.stats.running == 3
    assert [its.name for its in members.reports] == ["b"]


@pytest.mark.parametrize("names", [("a", "b"), ("b",), ()])
@pytest.mark.parametrize("field", [field.name for field in fields(DiskStats)])
def test_what_was_done_with_the_disk_outlives_a_replica_and_what_it_holds_does_not(
    field: str, names: tuple[str, ...]
) -> None:
    members = Membership(5.0, Clock())
    for name in ("a", "b"):
        stats = EngineStats(disk=replace(NO_DISK, **{field: 5}))
        members.hear(replace(REPORT, name=name, stats=stats))
    members.set_names(names)
    counts = field in ("read_bytes", "written_bytes", "failures")
    assert getattr(members.stats.disk, field) == (10 if counts else 5 * len(names))


def test_who_says_nothing_for_long_or_has_failed_is_silent_until_he_speaks() -> None:
    clock = Clock()
    members = Membership(5.0, clock)
    members.hear(REPORT)
    members.lose("a")
    assert members.silent == {"a"}
    assert members.alive == []
    members.hear(REPORT)
    assert members.silent == set()
    clock.now = 6.0
    assert members.silent == {"a"}
    members.set_names(())
    assert members.silent == set()


def test_what_replicas_are_like_is_known_when_the_last_one_is_gone() -> None:
    members = Membership(5.0, Clock())
    assert members.limiting_reports == []
    members.hear(REPORT)
    members.set_names(())
    assert members.reports == []
    assert members.limiting_reports == [REPORT]


def test_the_metrics_have_each_replica() -> None:
    members = Membership(5.0, Clock())
    busy = EngineStats(running=2, waiting=1, submitted_prompt_tokens=50, generated_tokens=7)
    members.hear(replace(REPORT, stats=busy))
    members.hear(replace(REPORT, name="b", stats=busy))
    members.lose("b")
    registry = CollectorRegistry()
    registry.register(ReplicasCollector(members))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("quire_replicas") == 2
    assert value("quire_replica_up_ratio", replica="a", host="here") == 1
    assert value("quire_replica_up_ratio", replica="b", host="here") == 0
    assert value("quire_replica_requests_running", replica="a", host="here") == 2
    assert value("quire_replica_generated_tokens_total", replica="a", host="here") == 7
    assert value("quire_replica_retries_total") == 0
