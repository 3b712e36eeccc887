import resource
import sys
from collections.abc import Iterator

import pytest

from server.guards.descriptors import (
    OTHER_DESCRIPTORS,
    connections_that_fit,
    raise_descriptor_limit,
)


class System:
    """What the system says of its limits."""

    def __init__(self, soft: int, hard: int, lets: bool = True) -> None:
        self.limits = (soft, hard)
        self.lets = lets

    def get(self, _: int) -> tuple[int, int]:
        return self.limits

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if not self.lets:
            raise ValueError
        self.limits = limits


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    found = System(256, 10_000)
    monkeypatch.setattr(resource, "getrlimit", found.get)
    monkeypatch.setattr(resource, "setrlimit", found.set)
    return found  # type: ignore[return-value]


def test_the_limit_is_raised_as_far_as_needed(system: System) -> None:
    assert connections_that_fit(512) == 512
    assert system.limits == (2 * 512 + OTHER_DESCRIPTORS, 10_000)
    assert raise_descriptor_limit(100) == 2 * 512 + OTHER_DESCRIPTORS


def test_and_no_further_than_the_system_lets_it(system: System) -> None:
    system.limits = (256, 1000)
    assert connections_that_fit(512) == (1000 - OTHER_DESCRIPTORS) // 2
    assert system.limits == (1000, 1000)
    system.limits, system.lets = (600, 10_000), False
    assert connections_that_fit(512) == (600 - OTHER_DESCRIPTORS) // 2


@pytest.mark.parametrize(
    ("hard", "connections"), [(512, 128), (500, 125), (256, 64), (64, 16), (40, 4), (33, 1), (9, 1)]
)
def test_few_descriptors_leave_connections_a_share(
    system: System, hard: int, connections: int
) -> None:
    system.limits = (hard, hard)
    assert connections_that_fit(512) == connections


def test_a_system_without_a_limit_has_none(system: System) -> None:
    system.limits = (256, resource.RLIM_INFINITY)
    assert connections_that_fit(5000) == 5000
    system.limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_descriptor_limit(10) == sys.maxsize
