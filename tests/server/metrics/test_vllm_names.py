import re
from dataclasses import replace

import httpx2
import pytest

from engine.figures import StepMeter
from engine.types import EngineStats
from server.config import MetricsSection
from server.metrics import Metrics
from server.metrics.registry import About
from tests.server.harness import Engine
from tests.server.metrics.scraping import Samples, client_with, samples_of, scrape

MODEL = {"model_name": "org/model", "engine": "0"}
SAME = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "prefix_cache_queries_total": "prompt_tokens_submitted_total",
    "prefix_cache_hits_total": "prompt_tokens_cached_total",
    "prompt_tokens_total": "prompt_tokens_submitted_total",
    "generation_tokens_total": "generated_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "spec_decode_num_draft_tokens_total": "drafted_tokens_total",
    "spec_decode_num_accepted_tokens_total": "accepted_tokens_total",
}
SAME_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_queue_time_seconds": "request_queue_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generated_tokens",
}


@pytest.fixture
def samples(engine: Engine) -> Samples:
    """After some work, with a different number for everything."""
    kv = engine.client.stats.kv
    assert kv is not None
    kv = replace(kv, capacity_tokens=1600, used_tokens=480, cached_tokens=320)
    meter = StepMeter()
    meter.left_queue(0.7)
    stats = EngineStats(
        running=3,
        waiting=4,
        submitted_prompt_tokens=50,
        cached_prompt_tokens=30,
        prompt_tokens=19,
        generated_tokens=77,
        preemptions=2,
        drafted_tokens=16,
        accepted_tokens=11,
        measured=meter.snapshot,
        kv=kv,
    )
    metrics = Metrics(
        client_with(stats), About(model="org/model"), settings=MetricsSection(vllm_names=True)
    )
    for finish in ("stop", "stop", "tool_calls", "length", "aborted", "error"):
        (answer,) = metrics.request_arrived().answers_to(12, 1, b"")
        for _ in range(4):
            answer.delivered(1, None)
        answer.end(finish)
    return samples_of(metrics.render().decode())


def series(samples: Samples, name: str, drop: dict[str, str] | None = None) -> dict[str, float]:
    """All of a name's, without the labels that only one side has."""
    found = {}
    for (sample, labels), number in samples.items():
        if re.fullmatch(rf"{name}(_bucket|_sum|_count)?", sample):
            kept = [pair for pair in labels if pair not in (drop or {}).items()]
            found[f"{sample.removeprefix(name)}{kept}"] = number
    return found


@pytest.mark.parametrize("name", [*SAME, *SAME_HISTOGRAMS])
def test_both_names_show_the_same_numbers(name: str, samples: Samples) -> None:
    theirs = series(samples, f"vllm:{name}", MODEL)
    assert theirs == series(samples, f"quire_{(SAME | SAME_HISTOGRAMS)[name]}")
    assert any(theirs.values())


def test_every_series_names_model_and_engine(samples: Samples) -> None:
    labels = [dict(labels) for (name, labels) in samples if name.startswith("vllm:")]
    assert all(MODEL.items() <= each.items() for each in labels)


def test_ends_are_called_as_there(samples: Samples) -> None:
    found = {
        dict(labels)["finished_reason"]: number
        for (name, labels), number in samples.items()
        if name == "vllm:request_success_total"
    }
    assert found == {"stop": 3, "length": 1, "abort": 1, "error": 1}


def test_what_is_cached_can_be_had_and_is_not_in_use(samples: Samples) -> None:
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        assert list(series(samples, name).values()) == [pytest.approx(0.3)]


def test_the_size_of_the_cache_is_told_in_blocks(samples: Samples) -> None:
    (labels,) = [dict(labels) for name, labels in samples if name == "vllm:cache_config_info"]
    assert labels == MODEL | {"block_size": "16", "num_gpu_blocks": "100"}


def test_without_a_pool_there_is_no_usage_yet() -> None:
    metrics = Metrics(client_with(), settings=MetricsSection(vllm_names=True))
    text = metrics.render().decode()
    assert "vllm:num_requests_running" in text
    assert "usage_perc" not in text


async def test_the_names_are_there_only_where_asked_for(http: httpx2.AsyncClient) -> None:
    assert not [name for name, _ in await scrape(http) if name.startswith("vllm:")]
