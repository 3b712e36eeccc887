"""The engine's newest snapshot; a scrape never waits for the engine."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.client import EngineClient
from engine.types import EngineStats, KVStats, MissReason
from server.metrics.families import counter, counters, gauge, histogram

POOL_GAUGES = {
    "capacity": "K and V that the budget allows",
    "committed": "K and V that the system charges for",
    "live": "Tokens of sequences that are open",
    "partial_tail": "Unused ends of blocks that hold live tokens",
    "mapped_ahead": "Blocks of open sequences that hold no token yet",
    "cached": "Blocks kept for prefix hits, owned by no sequence",
    "quarantined": "Blocks that wait for the device, for unmapping or for their return",
    "free": "Blocks that can be handed out, made or not",
    "free_slack": "Free blocks that may still hold memory of the system",
    "shared_saved": "What shared blocks would take beside that, if every sequence had its own",
    "block": "One block: the pages of all regions that hold the same tokens",
}


class EngineCollector(Collector):
    """What the engine says of itself."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        client, stats = self._client, self._client.stats
        yield gauge("quire_engine_alive_ratio", "1 while the engine runs", client.alive)
        yield gauge(
            "quire_engine_step_age_seconds",
            "Since the newest completed step, while something runs; else 0",
            client.step_age_s,
        )
        yield from _sequences(stats)
        yield from _tokens(stats)
        yield from _steps(stats)
        yield from _mlx(stats)
        if stats.kv is not None:
            yield from _pool(stats.kv)


def _sequences(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("quire_requests_running", "Sequences with memory", stats.running)
    yield gauge("quire_requests_waiting", "Sequences without memory", stats.waiting)
    yield histogram(
        "quire_request_queue_seconds",
        "From the submission of a request to the step that computes its first token",
        stats.measured.queue_seconds,
    )
    yield counter("quire_preemptions", "Sequences that gave up their memory", stats.preemptions)


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    yield counter("quire_prompt_tokens", "Prompt tokens computed", stats.prompt_tokens)
    yield counter(
        "quire_prompt_tokens_submitted",
        "Prompt tokens of admitted requests, cached or not",
        stats.submitted_prompt_tokens,
    )
    yield counter(
        "quire_prompt_tokens_cached",
        "Prompt tokens that came from the cache",
        stats.cached_prompt_tokens,
    )
    misses = dict(stats.prefix_misses)
    yield counters(
        "quire_prefix_misses",
        "Requests of which more could have been shared, by why it was not",
        ("reason",),
        [((reason.value,), misses.get(reason, 0)) for reason in MissReason],
    )
    yield counter("quire_generated_tokens", "Tokens generated", stats.generated_tokens)


def _steps(stats: EngineStats) -> Iterator[Metric]:
    measured = stats.measured
    yield counter("quire_steps", "Steps of the engine", stats.steps)
    yield histogram("quire_step_seconds", "Duration of steps", measured.step_seconds)
    yield histogram("quire_step_sequences", "Sequences that a step ran", measured.step_sequences)
    yield gauge("quire_step_duration_seconds", "Duration of the newest step", stats.step_seconds)
    yield gauge("quire_step_budget_tokens", "Prompt tokens a step may take", stats.token_budget)
    yield counter("quire_failed_rows", "Rows whose logits were not finite", stats.failed_rows)
    yield counter("quire_wasted_rows", "Rows of requests that had ended", stats.wasted_rows)
    yield counter(
        "quire_mapping_waits", "Steps that had to wait for a mapping", stats.mapping_waits
    )
    yield counter("quire_kv_copied_bytes", "K and V bytes copied", stats.copied_bytes)


def _mlx(stats: EngineStats) -> Iterator[Metric]:
    mlx = stats.mlx
    yield gauge("quire_mlx_active_bytes", "MLX's arrays in use, with the weights", mlx.active_bytes)
    yield gauge("quire_mlx_cache_bytes", "What MLX keeps for its next arrays", mlx.cache_bytes)
    yield gauge("quire_mlx_peak_bytes", "The most that MLX's arrays ever took", mlx.peak_bytes)


def _pool(kv: KVStats) -> Iterator[Metric]:
    for name, help_text in POOL_GAUGES.items():
        yield gauge(f"quire_kv_{name}_bytes", help_text, getattr(kv, f"{name}_bytes"))
    yield gauge("quire_kv_block_tokens", "Tokens of one block", kv.block_tokens)
    yield gauge("quire_kv_heaps", "Heaps that have been made", kv.num_heaps)
    kept = "Heaps whose memory stays with the process until it ends"
    yield gauge("quire_kv_heaps_kept", kept, kv.kept_heaps)
    yield counter(
        "quire_kv_mapped_blocks",
        "Blocks mapped behind a sequence's addresses, once for all their regions",
        kv.mapped_blocks,
    )
    yield counter(
        "quire_kv_unmapped_blocks",
        "Blocks taken from behind a sequence's addresses, once for all their regions",
        kv.unmapped_blocks,
    )
    yield counter(
        "quire_prefix_evicted_blocks",
        "Blocks of prefixes forgotten, for room or after a while without use",
        kv.evicted_blocks,
    )
