from server.metrics.answer_times import FINISH_REASONS
from server.metrics.requests import HttpMetrics, Refusal
from tests.server.metrics.scraping import Samples, requests, samples_of, value


def shown(metrics: HttpMetrics) -> Samples:
    return samples_of(metrics.render().decode())


def test_requests_are_counted_and_timed_by_endpoint() -> None:
    metrics = HttpMetrics(100)
    for status in (200, 200, 400):
        metrics.count_request("/a", status)
    metrics.request_ended("/a", 0.5)
    metrics.request_ended("/a", 2.0)
    metrics.request_ended("/b", 1.0)
    samples = shown(metrics)
    assert requests(samples) == {("/a", "200"): 2, ("/a", "400"): 1}
    name = "quire_http_request_duration_seconds"
    assert value(samples, f"{name}_sum", endpoint="/a") == 2.5
    assert value(samples, f"{name}_count", endpoint="/b") == 1


def test_every_reason_to_refuse_is_there_from_the_start() -> None:
    metrics = HttpMetrics(100)
    metrics.count_refusal(Refusal.HOST)
    samples = shown(metrics)
    found = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "quire_refused_requests_total"
    }
    assert found == dict.fromkeys(map(str, Refusal), 0) | {"host": 1}


def test_answers_are_counted_by_their_end() -> None:
    metrics = HttpMetrics(100)
    (answer,) = metrics.request_arrived().answers_to(3, 1, b"")
    answer.delivered(1, None)
    answer.delivered(2, "tool_calls")
    samples = shown(metrics)
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
