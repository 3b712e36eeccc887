import pytest

from engine.types import PrefixReport
from server.metrics.answer_times import Latencies, RequestTimes, token_bounds
from server.text.pieces import Delta
from tests.simulation.runner import Clock


def delta(tokens: int, finish: str | None = None, index: int = 0, *, cached: int = 0) -> Delta:
    """A delta of that many tokens; cached: how many of its prompt the cache had."""
    prefix = PrefixReport(cached, cached, None)
    return Delta(finish=finish, index=index, token_ids=(0,) * tokens, prefix=prefix)


def request(latencies: Latencies) -> tuple[RequestTimes, Clock]:
    clock = Clock(100.0)
    return RequestTimes(latencies, clock), clock


def test_an_answer_is_timed_from_its_request_to_its_end() -> None:
    latencies = Latencies(1000)
    times, clock = request(latencies)
    times.answers_to(7, 1, b"")
    for now, tokens, finish in ((100.5, 1, None), (100.75, 1, None), (102.0, 3, "stop")):
        clock.now = now
        times.observe(delta(tokens, finish))
    first, between = latencies.first_token_s.snapshot, latencies.inter_token_s.snapshot
    assert (sum(first.counts), first.total) == (1, 0.5)
    assert (sum(between.counts), between.total) == (2, 1.5)
    assert latencies.duration_s.snapshot.total == 2.0
    assert latencies.prompt_tokens.snapshot.total == 7
    assert latencies.generated_tokens.snapshot.total == 5
    assert latencies.finished == {"stop": 1}
    assert (times.first_token_s, times.generated_tokens, times.finish) == (0.5, 5, "stop")


def test_a_step_without_a_token_is_no_delivery() -> None:
    latencies = Latencies(1000)
    times, clock = request(latencies)
    times.answers_to(7, 1, b"")
    times.observe(delta(0))
    clock.now = 101.0
    times.observe(delta(1))
    times.observe(delta(0, "length"))
    assert sum(latencies.first_token_s.snapshot.counts) == 1
    assert sum(latencies.inter_token_s.snapshot.counts) == 0


def test_a_request_says_how_long_it_has_taken_and_its_answers() -> None:
    times, clock = request(Latencies(1000))
    assert (times.elapsed_s, times.generating_s) == (0.0, 0.0)
    times.answers_to(7, 2, b"")
    assert times.generating_s == 0.0
    for now, answer in ((100.5, 0), (100.75, 0), (101.0, 1), (103.0, 1)):
        clock.now = now
        times.observe(delta(1, index=answer))
    clock.now = 110.0
    assert (times.elapsed_s, times.generating_s) == (10.0, 2.0)


def test_only_the_first_end_counts() -> None:
    latencies = Latencies(1000)
    times, _ = request(latencies)
    times.answers_to(7, 1, b"")
    times.end("error")
    times.end("aborted")
    assert latencies.finished == {"error": 1}
    assert sum(latencies.duration_s.snapshot.counts) == 1
    with pytest.raises(AssertionError):
        times.end("tired")


def test_a_request_adds_its_answers_up_and_counts_each_prompt_once() -> None:
    latencies = Latencies(1000)
    times, clock = request(latencies)
    assert (times.first_token_s, times.finish, times.generated_tokens) == (None, None, 0)
    times.answers_to(10, 2, b"")
    times.answers_to(5, 1, b"")
    clock.now = 101.0
    times.observe(delta(1, "length", 2, cached=4))
    clock.now = 103.0
    times.observe(delta(1, index=0, cached=8))
    times.observe(delta(1, "stop", 0, cached=8))
    times.observe(delta(0, index=1, cached=9))
    times.end("aborted")
    assert (times.prompt_tokens, times.cached_tokens, times.generated_tokens) == (15, 12, 3)
    assert times.first_token_s == 1.0
    assert times.finish == "aborted,length,stop"
    assert latencies.prompt_tokens.snapshot.total == 25, "each answer has its prompt"


@pytest.mark.parametrize(
    ("most", "bounds"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 5)), (40, (1, 2, 5, 10, 20, 50))],
)
def test_classes_of_tokens_reach_as_far_as_the_model(most: int, bounds: tuple[int, ...]) -> None:
    assert token_bounds(most) == bounds
