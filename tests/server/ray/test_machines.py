"""Machines that come and go."""

import threading
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from server.ray import machines
from server.ray.machines import MachineWatcher, ReplicaCounts


@pytest.mark.parametrize("text", ["1", "3", "1-4", "2-12"])
def test_counts_are_written_as_they_are_read(text: str) -> None:
    assert str(ReplicaCounts.read(text)) == text
    assert str(ReplicaCounts.read("2-2")) == "2"


@pytest.mark.parametrize("text", ["0", "-1", "1-", "many", "3-1", "1-0", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"replicas are written|is the larger"):
        ReplicaCounts.read(text)


class Cluster:
    def __init__(self, **there: str) -> None:
        self.there = there
        self.unfit: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.sizes: list[tuple[ReplicaCounts, list[str]]] = []
        self.said: list[str] = []
        self.failures: list[Exception] = []
        self.ended = threading.Event()
        self.is_ending = False

    def machines(self) -> dict[str, str]:
        if self.is_ending:
            self.ended.set()
            raise ConnectionError
        return self.there

    def unfit_machines(self, plan: object, asked: Collection[str]) -> dict[str, str]:
        self.asked.append(list(asked))
        return {name: why for name, why in self.unfit.items() if name in asked}

    def resize(self, plan: object, counts: ReplicaCounts, unfit: Collection[str]) -> None:
        if self.failures:
            raise self.failures.pop()
        self.sizes.append((counts, list(unfit)))
        self.ended.set()

    def watcher(self, wanted: ReplicaCounts | None = None, per_machine: int = 1) -> MachineWatcher:
        return MachineWatcher(
            self, SimpleNamespace(per_machine=per_machine), wanted, self.said.append
        )


def test_a_machine_that_comes_gets_a_replica_and_one_that_leaves_is_waited_for() -> None:
    cluster = Cluster(n1="one")
    watcher = cluster.watcher()
    assert watcher.look()
    assert watcher.counts == ReplicaCounts(1, 1)
    cluster.there["n2"] = "two"
    assert watcher.look()
    assert (watcher.room, watcher.counts) == (2, ReplicaCounts(2, 2))
    del cluster.there["n2"]
    assert not watcher.look()
    assert (watcher.room, watcher.counts) == (1, ReplicaCounts(2, 2))
    cluster.there["n3"] = "two"
    assert not watcher.look(), "its replica waits for it"
    assert cluster.asked == [["n1"], ["n2"], ["n3"]]


def test_a_machine_that_does_not_fit_is_named_and_gets_none() -> None:
    cluster = Cluster(n1="one")
    watcher = cluster.watcher(per_machine=2)
    watcher.look()
    cluster.there["n2"], cluster.unfit["n2"] = "two", "it is too small"
    assert watcher.look()
    assert (watcher.room, watcher.unfit) == (2, ["n2"])
    assert cluster.said == ["no replica on two: it is too small"]


def test_no_more_replicas_than_are_wanted() -> None:
    cluster = Cluster(n1="one", n2="two", n3="three")
    watcher = cluster.watcher(ReplicaCounts(1, 2))
    watcher.look()
    assert (watcher.room, watcher.counts) == (3, ReplicaCounts(1, 2))
    watcher = cluster.watcher(ReplicaCounts(2, 5))
    watcher.look()
    assert watcher.counts == ReplicaCounts(2, 3)


def test_what_has_changed_is_deployed_though_the_first_attempt_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "WATCH_S", 0.01)
    cluster = Cluster(n1="one")
    watcher = cluster.watcher()
    watcher.look()
    cluster.failures = [ConnectionError("gone"), ConnectionError("gone")]
    cluster.there["n2"] = "two"
    watcher.keep_looking(cluster.ended)
    assert cluster.sizes == [(ReplicaCounts(2, 2), [])]
    assert cluster.said == [
        "the machines cannot be asked now: ConnectionError: gone",
        "replicas: 2",
    ]


def test_what_fails_after_the_end_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "WATCH_S", 0.01)
    cluster = Cluster(n1="one")
    cluster.is_ending = True
    watcher = cluster.watcher()
    watcher.keep_looking(cluster.ended)
    assert cluster.said == []


def test_where_nothing_changes_nothing_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "WATCH_S", 0.01)
    cluster = Cluster(n1="one")
    watcher = cluster.watcher()
    watcher.look()
    threading.Timer(0.1, cluster.ended.set).start()
    watcher.keep_looking(cluster.ended)
    assert cluster.sizes == []
