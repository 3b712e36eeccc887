import pytest

from tests.bench import rounds
from tests.bench.rounds import Rounds


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


def numbers(some: Rounds, clock: Clock, round_s: float) -> list[int]:
    """Of rounds that take as long as that."""
    seen: list[int] = []
    for number in some:
        seen.append(number)
        clock.now_s += round_s
    return seen


def test_there_are_as_many_rounds_as_were_asked_for(clock: Clock) -> None:
    assert numbers(Rounds(4, 100.0), clock, 1.0) == [0, 1, 2, 3]


def test_no_round_begins_after_the_limit(clock: Clock) -> None:
    assert numbers(Rounds(100, 10.0), clock, 4.0) == [0, 1, 2]
    assert numbers(Rounds(100, 10.0), clock, 5.0) == [0, 1, 2], "the limit itself is in time"


def test_there_is_one_round_however_long_it_takes(clock: Clock) -> None:
    assert numbers(Rounds(5, 0.0), clock, 60.0) == [0]


def test_the_limit_counts_anew_every_time(clock: Clock) -> None:
    some = Rounds(3, 10.0)
    assert numbers(some, clock, 4.0) == numbers(some, clock, 4.0) == [0, 1, 2]
