import resource
import sys
from collections.abc import Iterator

import pytest

from engine.machine import raise_descriptor_limit
from server.guards.descriptors import OTHER_DESCRIPTORS, connections_that_fit


class System:
    """What the system says of its limits, and how many files it lets a process have at most."""

    def __init__(self, soft: int, hard: int, most: int = 1_000_000) -> None:
        self.limits = (soft, hard)
        self.most = most

    def get(self, _: int) -> tuple[int, int]:
        return self.limits

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= self.most:
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    found = System(256, 10_000)
    monkeypatch.setattr(resource, "getrlimit", found.get)
    monkeypatch.setattr(resource, "setrlimit", found.set)
    return found  # type: ignore[return-value]


def test_the_limit_is_raised_to_the_hard_one(system: System) -> None:
    assert raise_descriptor_limit() == 10_000
    assert system.limits == (10_000, 10_000)
    assert connections_that_fit(512) == 512
    assert connections_that_fit(5000) == (10_000 - OTHER_DESCRIPTORS) // 2


@pytest.mark.parametrize("infinity", [-1, 2**63 - 1])  # Linux's, a Mac's
@pytest.mark.parametrize("most", [10_240, 61_440, 122_880])
def test_and_no_further_than_the_system_lets_it(
    system: System, monkeypatch: pytest.MonkeyPatch, infinity: int, most: int
) -> None:
    monkeypatch.setattr(resource, "RLIM_INFINITY", infinity)
    system.limits, system.most = (256, infinity), most
    assert raise_descriptor_limit() == most
    assert system.limits == (most, infinity)
    assert raise_descriptor_limit() == most


def test_a_system_that_raises_nothing_leaves_what_there_is(system: System) -> None:
    system.limits, system.most = (600, 10_000), 600
    assert connections_that_fit(512) == (600 - OTHER_DESCRIPTORS) // 2
    assert system.limits == (600, 10_000)


@pytest.mark.parametrize(
    ("hard", "connections"), [(512, 128), (500, 125), (256, 64), (64, 16), (40, 4), (33, 1), (9, 1)]
)
def test_few_descriptors_leave_connections_a_share(
    system: System, hard: int, connections: int
) -> None:
    system.limits = (hard, hard)
    assert connections_that_fit(512) == connections


def test_a_system_without_a_limit_has_none(system: System) -> None:
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert connections_that_fit(5000) == 5000
    assert raise_descriptor_limit() == sys.maxsize
