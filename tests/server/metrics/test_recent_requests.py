"""What is kept of requests that have ended."""

import pytest

from server.metrics.answer_times import KEPT_REQUESTS, Latencies, RecentRequests, RequestTimes
from tests.simulation.runner import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def ring(clock: Clock) -> RecentRequests:
    return RecentRequests(clock)


def request_at(clock: Clock) -> RequestTimes:
    return RequestTimes(Latencies(1024), clock)


def test_a_request_is_timed_from_its_first_token_to_its_end(
    clock: Clock, ring: RecentRequests
) -> None:
    times = request_at(clock)
    times.id = "one"
    (answer,) = times.answers_to(20, 1, b"")
    answer.cached_tokens = 16
    clock.now += 2
    answer.delivered(1, None)
    clock.now += 4
    answer.delivered(8, "stop")
    ring.add(times)
    (request,) = ring.newest_first()
    assert (request["number"], request["id"]) == (1, "one")
    assert (request["answers"], request["finish"]) == (1, "stop")
    assert (request["prompt_tokens"], request["cached_tokens"], request["generated_tokens"]) == (
        20,
        16,
        9,
    )
    assert (request["first_token_s"], request["duration_s"], request["tokens_per_s"]) == (
        2.0,
        6.0,
        2.0,
    )
    clock.now += 3
    assert ring.newest_first()[0]["ended_s_ago"] == 3.0


def test_without_tokens_there_is_neither_a_first_one_nor_a_rate(
    clock: Clock, ring: RecentRequests
) -> None:
    times = request_at(clock)
    times.answers_to(20, 1, b"")[0].end("length")
    ring.add(times)
    (request,) = ring.newest_first()
    assert (request["first_token_s"], request["tokens_per_s"], request["cached_tokens"]) == (
        None,
        None,
        0,
    )


@pytest.mark.parametrize("generated", [1, 2])
def test_a_rate_needs_two_tokens_and_time_between_them(
    clock: Clock, ring: RecentRequests, generated: int
) -> None:
    times = request_at(clock)
    times.answers_to(20, 1, b"")[0].delivered(generated, "stop")
    ring.add(times)
    assert ring.newest_first()[0]["tokens_per_s"] is None


def test_what_the_engine_never_had_is_not_kept(clock: Clock, ring: RecentRequests) -> None:
    ring.add(request_at(clock))
    assert ring.newest_first() == []


def test_only_the_last_ones_are_kept(clock: Clock, ring: RecentRequests) -> None:
    for _ in range(KEPT_REQUESTS + 3):
        times = request_at(clock)
        times.answers_to(20, 1, b"")
        ring.add(times)
    numbers = [request["number"] for request in ring.newest_first()]
    assert numbers == list(range(KEPT_REQUESTS + 3, 3, -1))
