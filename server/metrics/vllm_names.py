"""Repeats some metrics under vLLM's names, for dashboards made for vLLM. They are off by default,
because promtool refuses names with a colon. https://docs.vllm.ai/en/stable/usage/metrics.html"""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from engine.types import KVStats
from server.metrics.answer_times import Latencies
from server.metrics.families import Labelled, counters, gauges, histograms

LABELS = ("model_name", "engine")
FIRST_TOKEN, PROMPT = "time_to_first_token_seconds", "request_prompt_tokens"
GENERATED = "request_generated_tokens"
# ``{vLLM's finish reason: quire's finish reasons}``. Tool calls count as "stop".
REASONS = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("aborted",),
    "error": ("error",),
}


class VllmCollector(Collector):
    """Collects copies of quire's own metrics under vLLM's names."""

    def __init__(self, client: ServingEngine, latencies: Latencies, model: str) -> None:
        self._client = client
        self._latencies = latencies
        self._labels = (model, "0")

    def collect(self) -> Iterator[Metric]:
        stats, seen = self._client.stats, self._latencies
        between, submitted = seen.inter_token_s.snapshot, stats.submitted_prompt_tokens
        for name, own_name, value in (
            ("num_requests_running", "requests_running", stats.running),
            ("num_requests_waiting", "requests_waiting", stats.waiting),
        ):
            yield gauges(f"vllm:{name}", LABELS, self._one(value), _same_as(own_name))
        for name, own_name, value in (
            ("prefix_cache_queries", "prompt_tokens_submitted_total", submitted),
            ("prefix_cache_hits", "prompt_tokens_cached_total", stats.cached_prompt_tokens),
            ("prompt_tokens", "prompt_tokens_submitted_total", submitted),
            ("generation_tokens", "generated_tokens_total", stats.generated_tokens),
            ("num_preemptions", "preemptions_total", stats.preemptions),
            ("spec_decode_num_draft_tokens", "drafted_tokens_total", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "accepted_tokens_total", stats.accepted_tokens),
        ):
            yield counters(f"vllm:{name}", LABELS, self._one(value), _same_as(own_name))
        if stats.kv is not None:
            yield from self._pool(stats.kv)
        yield self._finished()
        for name, own_name, counts in (
            (FIRST_TOKEN, FIRST_TOKEN, seen.first_token_s.snapshot),
            ("inter_token_latency_seconds", "inter_token_latency_seconds", between),
            ("time_per_output_token_seconds", "inter_token_latency_seconds", between),
            ("e2e_request_latency_seconds", "request_duration_seconds", seen.duration_s.snapshot),
            ("request_queue_time_seconds", "request_queue_seconds", stats.measured.queue_seconds),
            (PROMPT, PROMPT, seen.prompt_tokens.snapshot),
            ("request_generation_tokens", GENERATED, seen.generated_tokens.snapshot),
        ):
            yield histograms(f"vllm:{name}", LABELS, [(self._labels, counts)], _same_as(own_name))

    def _pool(self, kv: KVStats) -> Iterator[Metric]:
        """Yield the metrics of the KV cache. As in vLLM, cached blocks count as free."""
        used, blocks = kv.used_tokens / kv.capacity_tokens, kv.capacity_tokens // kv.block_tokens
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield gauges(f"vllm:{name}", LABELS, self._one(used))
        sizes = (*self._labels, str(kv.block_tokens), str(blocks))
        labels = (*LABELS, "block_size", "num_gpu_blocks")
        yield gauges("vllm:cache_config_info", labels, [(sizes, 1)])

    def _finished(self) -> Metric:
        finished = self._latencies.finished
        ends = [
            ((*self._labels, reason), sum(finished[own_name] for own_name in own_names))
            for reason, own_names in REASONS.items()
        ]
        labels, text = (*LABELS, "finished_reason"), _same_as("requests_finished_total")
        return counters("vllm:request_success", labels, ends, text)

    def _one(self, value: float) -> Labelled:
        return [(self._labels, value)]


def _same_as(own_name: str) -> str:
    return f"The same figure as quire_{own_name}, under the name that vLLM uses"
