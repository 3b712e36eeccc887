"""Who the replicas are."""

from dataclasses import replace

from engine.types import EngineLimits, EngineStats
from server.cluster.membership import Membership
from server.cluster.messages import ReplicaReport

REPORT = ReplicaReport("a", "here", EngineLimits(100, 4, 10), EngineStats(), 8, 0.0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
    assert members.telling == []
    members.hear(REPORT)
    members.set_names(())
    assert members.reports == []
    assert members.telling == [REPORT]
