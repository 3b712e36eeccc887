"""The order of evictions over several groups of layers."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from kvcache import evictor
from kvcache.evictor import NOTHING_TO_EVICT, UseClock
from kvcache.groups.base import KVGroup, evict_cheapest


@dataclass
class Offers:
    """A group that has these left to evict, by their worth per byte."""

    name: str
    left: list[float]
    evicted: list[tuple[str, float]] = field(default_factory=list)

    def cheapest(self) -> float:
        return self.left[0] if self.left else NOTHING_TO_EVICT

    def evict(self) -> None:
        self.evicted.append((self.name, self.left.pop(0)))


def as_groups(*offers: Offers) -> list[KVGroup]:
    return cast("list[KVGroup]", offers)


def test_what_saves_least_per_byte_goes_first_whichever_group_has_it() -> None:
    one, other = Offers("one", [1.0, 4.0, 5.0]), Offers("other", [2.0, 3.0])
    other.evicted = one.evicted
    evict_cheapest(as_groups(one, other))
    assert [worth for _, worth in one.evicted] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_of_equal_offers_the_first_groups_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor, "EVICTED_AT_ONCE", 1)
    one, other = Offers("one", [1.0]), Offers("other", [1.0])
    evict_cheapest(as_groups(one, other))
    assert (one.left, other.left) == ([], [1.0])


def test_what_saves_more_or_was_used_later_is_worth_more() -> None:
    clock = UseClock()
    old = clock.now
    assert clock.worth(64, old) > clock.worth(16, old)
    clock.tick()
    assert clock.worth(16, clock.now) > clock.worth(16, old)
