import pytest

from server.metrics.answer_times import Latencies, RequestTimes, token_bounds
from tests.simulation.runner import Clock


def request(latencies: Latencies) -> tuple[RequestTimes, Clock]:
    clock = Clock(100.0)
    return RequestTimes(latencies, clock), clock


def test_an_answer_is_timed_from_its_request_to_its_end() -> None:
    latencies = Latencies(1000)
    times, clock = request(latencies)
    (answer,) = times.answers_to(7, 1, b"")
    for now, tokens, finish in ((100.5, 1, None), (100.75, 2, None), (102.0, 5, "stop")):
        clock.now = now
        answer.delivered(tokens, finish)
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
    (answer,) = times.answers_to(7, 1, b"")
    answer.delivered(0, None)
    clock.now = 101.0
    answer.delivered(1, None)
    answer.delivered(1, "length")
    assert sum(latencies.first_token_s.snapshot.counts) == 1
    assert sum(latencies.inter_token_s.snapshot.counts) == 0


def test_a_request_says_how_long_it_has_taken_and_its_answers() -> None:
    times, clock = request(Latencies(1000))
    assert (times.elapsed_s, times.generating_s) == (0.0, 0.0)
    short, long = times.answers_to(7, 2, b"")
    assert times.generating_s == 0.0
    for now, tokens in ((100.5, 1), (100.75, 2)):
        clock.now = now
        short.delivered(tokens, None)
    for now, tokens in ((101.0, 1), (103.0, 2)):
        clock.now = now
        long.delivered(tokens, None)
    clock.now = 110.0
    assert (times.elapsed_s, times.generating_s) == (10.0, 2.0)


def test_only_the_first_end_counts() -> None:
    latencies = Latencies(1000)
    times, _ = request(latencies)
    (answer,) = times.answers_to(7, 1, b"")
    answer.end("error")
    answer.end("aborted")
    assert latencies.finished == {"error": 1}
    assert sum(latencies.duration_s.snapshot.counts) == 1
    with pytest.raises(AssertionError):
        answer.end("tired")


def test_a_request_adds_its_answers_up_and_counts_each_prompt_once() -> None:
    latencies = Latencies(1000)
    times, clock = request(latencies)
    assert (times.first_token_s, times.finish, times.generated_tokens) == (None, None, 0)
    one, two = times.answers_to(10, 2, b"")
    (three,) = times.answers_to(5, 1, b"")
    for answer, cached in ((one, 8), (two, 9), (three, 4)):
        answer.cached_tokens = cached
    clock.now = 101.0
    three.delivered(1, "length")
    clock.now = 103.0
    one.delivered(1, None)
    one.delivered(2, "stop")
    two.end("aborted")
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
