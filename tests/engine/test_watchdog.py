"""How long a step has been seen at work."""

from engine.watchdog import LONGEST_BREAK_S, Watchdog

LIMIT_S = 30.0


def first_bark(busy_since: float | None, checks: list[float]) -> float | None:
    """When a watchdog first says that the step takes too long."""
    watchdog = Watchdog(LIMIT_S)
    return next((now for now in checks if watchdog.check(now, busy_since)), None)


def seconds(start: float, end: float) -> list[float]:
    return [start + number for number in range(int(end - start) + 1)]


def test_a_step_is_too_long_when_it_has_been_seen_for_the_limit() -> None:
    assert first_bark(100.0, seconds(100, 200)) == 130.0


def test_a_step_counts_from_its_beginning_not_from_the_first_check_of_it() -> None:
    watchdog = Watchdog(2.0)
    assert not watchdog.check(10.0, None)
    assert not watchdog.check(11.0, 10.5)
    assert not watchdog.check(12.0, 10.5)
    assert watchdog.check(12.5, 10.5)


def test_an_idle_engine_may_be_idle_for_ever() -> None:
    assert first_bark(None, seconds(0, 1000)) is None


def test_steps_that_come_to_an_end_are_never_too_long_however_many_there_are() -> None:
    watchdog = Watchdog(LIMIT_S)
    assert not any(watchdog.check(now, now - now % 29) for now in seconds(0, 1000))


def test_a_process_that_stood_still_did_not_see_its_step_at_work() -> None:
    """Stopped for an hour and continued: the step gets its time all the same."""
    watchdog = Watchdog(LIMIT_S)
    assert not any(watchdog.check(now, 0.0) for now in seconds(0, 10))
    assert not watchdog.check(3610.0, 0.0)
    barks = [now for now in seconds(3611, 3700) if watchdog.check(now, 0.0)]
    assert barks[0] == 3610.0 + LIMIT_S - 10.0 - LONGEST_BREAK_S
