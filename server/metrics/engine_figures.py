"""Makes metrics from the engine's newest statistics, without a wait for the engine."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from engine.types import Drafting, EngineStats, KVStats, MissReason, SlotStats
from server.metrics.families import counter, counters, each, gauge, gauges, histogram

# Attributes of the engine's statistics, each of which is a metric of this name.
ENGINE_COUNTERS = (
    *("preemptions", "prompt_tokens", "generated_tokens", "steps"),
    *("failed_rows", "wasted_rows", "mapping_waits", "drafted_tokens", "accepted_tokens"),
)
MLX_GAUGES = ("active_bytes", "cache_bytes", "peak_bytes")
DISK_COUNTERS = ("read_bytes", "written_bytes", "failures")
SLOT_GAUGES = ("free", "held", "waiting")
POOL_COUNTERS = ("mapped_blocks", "unmapped_blocks", "late_signals")
POOL_GAUGES = (
    *("capacity_bytes", "committed_bytes", "live_bytes", "partial_tail_bytes"),
    *("mapped_ahead_bytes", "cached_bytes", "quarantined_bytes", "free_bytes"),
    *("free_slack_bytes", "shared_saved_bytes", "block_bytes", "block_tokens"),
)


class EngineCollector(Collector):
    """Collects the metrics of the engine."""

    def __init__(self, client: ServingEngine) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        yield gauge("quire_engine_alive_ratio", client.alive)
        yield gauge("quire_engine_step_age_seconds", client.step_age_s)
        yield from _requests(stats)
        yield from _steps(stats)
        yield from each(counter, "quire_{}_total", ENGINE_COUNTERS, stats)
        yield from each(gauge, "quire_mlx_{}", MLX_GAUGES, stats.mlx)
        yield gauge("quire_disk_held_bytes", stats.disk.held_bytes)
        yield from each(counter, "quire_disk_{}_total", DISK_COUNTERS, stats.disk)
        if stats.kv is not None:
            yield from _pool(stats.kv)
            yield from _slots(stats.kv.slots)


def _requests(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("quire_requests_running", stats.running)
    yield gauge("quire_requests_waiting", stats.waiting)
    yield histogram("quire_request_queue_seconds", stats.measured.queue_seconds)
    yield counter("quire_prompt_tokens_submitted_total", stats.submitted_prompt_tokens)
    yield counter("quire_prompt_tokens_cached_total", stats.cached_prompt_tokens)
    reasons = [((reason.value,), stats.prefix_misses[reason]) for reason in MissReason]
    yield counters("quire_prefix_misses_total", ("reason",), reasons)


def _steps(stats: EngineStats) -> Iterator[Metric]:
    yield histogram("quire_step_seconds", stats.measured.step_seconds)
    yield histogram("quire_step_sequences", stats.measured.step_sequences)
    yield gauge("quire_step_duration_seconds", stats.step_seconds)
    yield gauge("quire_step_budget_tokens", stats.token_budget)
    yield counter("quire_kv_copied_bytes_total", stats.copied_bytes)
    states = [((state.name.lower(),), state is stats.drafting) for state in Drafting]
    yield gauges("quire_drafting", ("state",), states)


def _slots(slots: SlotStats) -> Iterator[Metric]:
    yield gauge("quire_state_slots", slots.slots)
    yield from each(gauge, "quire_state_slots_{}", SLOT_GAUGES, slots)
    cached = [((keep,), count) for keep, count in slots.cached]
    yield gauges("quire_state_slots_cached", ("keep",), cached)
    yield counter("quire_state_slots_evicted_total", slots.evicted)
    yield gauge("quire_state_slot_bytes", slots.slot_bytes)
    yield gauge("quire_state_committed_bytes", slots.committed_bytes)


def _pool(kv: KVStats) -> Iterator[Metric]:
    yield from each(gauge, "quire_kv_{}", POOL_GAUGES, kv)
    yield from each(counter, "quire_kv_{}_total", POOL_COUNTERS, kv)
    yield gauge("quire_kv_heaps", kv.num_heaps)
    yield gauge("quire_kv_heaps_kept", kv.kept_heaps)
    yield counter("quire_prefix_evicted_blocks_total", kv.evicted_blocks)
