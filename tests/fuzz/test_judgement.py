import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.fuzz.crowd import Outcome, verdict
from tests.fuzz.judgement import KEPT_BYTES, MIB, Answer, Figures, kept, problems, squared
from tests.fuzz.watch import gaps_s

CALM = Figures(0.03, 0.01, 0.01, 0.01, peak_bytes=150 * MIB, last_bytes=150 * MIB)
GOOD = Answer(400, 0.1)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"health_gap_s": 0.2, "stream_gap_s": 0.2}, []),
        ({"health_gap_s": 0.3}, ["health gap"]),
        ({"health_gap_s": 0.3, "own_gap_s": 0.2}, []),
        ({"stream_gap_s": 0.3}, ["stream gap"]),
        ({"peak_bytes": 260 * MIB}, []),
        ({"peak_bytes": 263 * MIB}, ["memory"]),
        ({"is_back": False}, ["not back"]),
    ],
)
def test_what_the_watch_saw_is_judged_by_what_it_sees_in_calm(
    changes: dict[str, float], kinds: list[str]
) -> None:
    seen = replace(CALM, **changes)  # type: ignore[arg-type]
    assert list(problems(GOOD, seen, CALM, MIB)) == kinds


def test_a_busy_machine_has_longer_gaps_in_calm_and_may_have_them() -> None:
    seen = replace(CALM, health_gap_s=0.5)
    assert not problems(GOOD, seen, replace(CALM, health_gap_s=0.2), MIB)


def test_errors_of_the_server_and_no_answer_are_findings_and_weather_is_not() -> None:
    for status, kinds in {500: ["status 500"], 502: ["status 502"], None: ["no answer"]}.items():
        assert list(problems(Answer(status, 0.1), None, CALM, 1)) == kinds
    for status in (200, 400, 413, 429, 503):
        assert not problems(Answer(status, 0.1), None, CALM, 1)


def test_times_grow_with_the_square_when_two_doublings_say_so() -> None:
    assert "time" in squared([0.001, 0.06, 0.24, 0.96])
    assert not squared([0.06, 0.12, 0.24])
    assert not squared([0.06, 0.24, 0.5]), "once is chance"
    assert not squared([0.001, 0.004, 0.016]), "short times say nothing"
    assert not squared([0.06, 0.24])
    assert not squared([0.06, 0.24, 0.96], bound_s=1.0), "a deadline holds them"
    assert "time" in squared([0.06, 0.24, 1.1], bound_s=1.0)


def test_memory_that_is_not_given_back_is_a_finding() -> None:
    assert not kept(replace(CALM, last_bytes=CALM.last_bytes + KEPT_BYTES), CALM)
    assert kept(replace(CALM, last_bytes=CALM.last_bytes + KEPT_BYTES + 1), CALM)


def test_gaps_are_those_that_touch_the_while() -> None:
    times = [1.0, 2.0, 4.0, 7.0, 7.5]
    assert gaps_s(times, 2.5, 6.0) == [2.0, 3.0]
    assert gaps_s(times, 2.0, 4.0) == [2.0]
    assert gaps_s(times, 4.5, 5.0) == [3.0]
    now_s = time.monotonic()
    (left,) = gaps_s([now_s - 5.0], now_s - 1.0, now_s)
    assert left >= 5.0, "nothing has come since"


def test_a_hostile_crowd_may_do_no_more_than_an_ordinary_one() -> None:
    plain = Outcome(Counter({200: 9, 400: 1}), 1.0, CALM, 200 * MIB, 210 * MIB)
    busy = replace(CALM, health_gap_s=0.3, stream_gap_s=0.3)
    assert verdict(plain, replace(plain, statuses=Counter({429: 5, 503: 5, 413: 1}))) == {}
    assert verdict(replace(plain, seen=busy), replace(plain, seen=busy)) == {}
    for rude in (
        replace(plain, seen=busy),
        replace(plain, seen=replace(CALM, stream_p99_s=0.06)),
        replace(plain, statuses=Counter({500: 1})),
        replace(plain, statuses=Counter({None: 1})),
        replace(plain, after_bytes=221 * MIB),
        replace(plain, seen=replace(CALM, is_back=False)),
    ):
        assert verdict(plain, rude), rude
