import pytest

from tests.bench.interference import Disturbance, touching

TIMES = [1.0, 2.0, 4.0, 7.0]


@pytest.mark.parametrize(
    ("from_s", "until_s", "lengths"),
    [
        (1.0, 7.0, [1.0, 2.0, 3.0]),
        (1.5, 3.0, [1.0, 2.0]),  # in the midst of two gaps
        (2.5, 3.0, [2.0]),  # in the midst of one
        (2.0, 4.0, [2.0]),
        (0.0, 1.5, [1.0]),  # before the first arrival there is no gap
        (5.0, 9.0, [3.0, 2.0]),  # the last one has no end yet
        (8.0, 9.0, [2.0]),
    ],
)
def test_gaps_that_touch_an_interval_are_taken_whole(
    from_s: float, until_s: float, lengths: list[float]
) -> None:
    assert touching(TIMES, from_s, until_s) == lengths


def test_a_reader_who_gets_nothing_waits_all_the_time() -> None:
    assert touching([1.0], 2.0, 10.0) == [9.0]


def test_a_reader_may_have_to_bear_three_steps_at_their_target_or_as_they_are() -> None:
    assert Disturbance(500.0, 20.0, 10.0, 50.0, 900.0).allowed_ms == 300.0
    assert Disturbance(500.0, 150.0, 10.0, 50.0, 900.0).allowed_ms == 450.0
