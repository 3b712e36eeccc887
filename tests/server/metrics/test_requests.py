from prometheus_client import CollectorRegistry, generate_latest

from server.metrics.answer_times import FINISH_REASONS, Latencies, RequestTimes
from server.metrics.requests import Refusal, RequestFigures
from tests.server.metrics.scraping import Samples, requests, samples_of, value


def shown(figures: RequestFigures) -> Samples:
    registry = CollectorRegistry()
    registry.register(figures)
    return samples_of(generate_latest(registry).decode())


def test_requests_are_counted_and_timed_by_endpoint() -> None:
    figures = RequestFigures(Latencies(100))
    for status in (200, 200, 400):
        figures.count_request("/a", status)
    figures.observe_duration("/a", 0.5)
    figures.observe_duration("/a", 2.0)
    figures.observe_duration("/b", 1.0)
    samples = shown(figures)
    assert requests(samples) == {("/a", "200"): 2, ("/a", "400"): 1}
    name = "quire_http_request_duration_seconds"
    assert value(samples, f"{name}_sum", endpoint="/a") == 2.5
    assert value(samples, f"{name}_count", endpoint="/b") == 1


def test_every_reason_to_refuse_is_there_from_the_start() -> None:
    figures = RequestFigures(Latencies(100))
    figures.count_refusal(Refusal.HOST)
    samples = shown(figures)
    found = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "quire_refused_requests_total"
    }
    assert found == dict.fromkeys(map(str, Refusal), 0) | {"host": 1}


def test_answers_are_counted_by_their_end() -> None:
    latencies = Latencies(100)
    times = RequestTimes(latencies)
    (answer,) = times.answers_to(3, 1, b"")
    answer.delivered(1, None)
    answer.delivered(2, "tool_calls")
    samples = shown(RequestFigures(latencies))
    finished = "quire_requests_finished_total"
    assert {r: value(samples, finished, reason=r) for r in FINISH_REASONS} == {
        "stop": 0,
        "length": 0,
        "tool_calls": 1,
        "error": 0,
        "aborted": 0,
    }
    for name in (
        "quire_time_to_first_token_seconds",
        "quire_inter_token_latency_seconds",
        "quire_request_duration_seconds",
        "quire_request_prompt_tokens",
        "quire_request_generated_tokens",
    ):
        assert value(samples, f"{name}_count") == 1
    assert value(samples, "quire_request_prompt_tokens_sum") == 3
    assert value(samples, "quire_request_generated_tokens_sum") == 2
