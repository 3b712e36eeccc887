"""Makes metrics from the engine's newest statistics, without a wait for the engine."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from engine.types import EngineStats, KVStats, MissReason, SlotStats
from server.metrics.families import counter, counters, each, gauge, gauges, histogram

# ``{attribute of the engine's statistics: help text of the metric with this name}``.
ENGINE_COUNTERS = {
    "preemptions": (
        "Times that KV cache memory ran out and a running sequence had to free its blocks and wait"
    ),
    "prompt_tokens": (
        "Prompt tokens that steps have computed, those computed again after a preemption included"
    ),
    "generated_tokens": "Tokens that the model has generated, for all answers",
    "steps": (
        "Steps that the engine has run: each is one pass of the model over all scheduled tokens"
    ),
    "failed_rows": "Answers that ended with an error because the model's output was not finite",
    "wasted_rows": (
        "Results that were computed for a sequence that had ended meanwhile, and discarded"
    ),
    "mapping_waits": "Steps that had to wait until KV cache memory was mapped",
}
MLX_GAUGES = {
    "active": "Bytes of MLX arrays in use, model weights included",
    "cache": "Bytes of freed memory that MLX keeps to reuse for its next arrays",
    "peak": "Largest number of bytes that MLX arrays have used at once since the start",
}
SLOT_GAUGES = {
    "free": "Slots that can be handed out",
    "held": "Slots that open sequences go on from or write, each shared one counted once",
    "waiting": "Slots that cannot be reused yet because the device may still use them",
}
POOL_COUNTERS = {
    "mapped_blocks": (
        "KV cache blocks that were mapped into a sequence's address range, counted once for all "
        "layers"
    ),
    "unmapped_blocks": (
        "KV cache blocks that were unmapped from a sequence's address range, counted once for all "
        "layers"
    ),
    "late_signals": "Pauses for mapping that waited for the GPU's signal of a step that was read",
}
POOL_GAUGES = {
    "capacity": (
        "KV cache bytes that the memory budget allows: the sum of free, live, partial tail, mapped "
        "ahead, cached and quarantined"
    ),
    "committed": (
        "Bytes of KV cache memory that the operating system charges this process for, states of "
        "recurrent layers included"
    ),
    "live": "KV cache bytes that hold tokens of open sequences, each shared block counted once",
    "partial_tail": (
        "KV cache bytes behind the newest token of each open sequence, in its last block that "
        "holds tokens"
    ),
    "mapped_ahead": (
        "KV cache bytes of blocks that are mapped for open sequences in advance and hold no token "
        "yet"
    ),
    "cached": "KV cache bytes of blocks that no sequence uses and that are kept for prefix hits",
    "quarantined": (
        "KV cache bytes of freed blocks that cannot be reused yet: the device may still use them, "
        "or they are being unmapped or released to the operating system"
    ),
    "free": "KV cache bytes of blocks that can be allocated, whether their heap exists yet or not",
    "free_slack": (
        "KV cache bytes of free blocks whose memory may not have been released to the operating "
        "system"
    ),
    "shared_saved": "Additional bytes that the KV cache would need if sequences shared no blocks",
    "block": (
        "Bytes of one KV cache block, the unit of allocation: the K and V of quire_kv_block_tokens "
        "tokens in all layers"
    ),
}


class EngineCollector(Collector):
    """Collects the metrics of the engine."""

    def __init__(self, client: ServingEngine) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        yield gauge(
            "quire_engine_alive_ratio",
            "1 while the engine runs, 0 before it has started and after it has failed or stopped",
            client.alive,
        )
        yield gauge(
            "quire_engine_step_age_seconds",
            "Seconds since a step last completed while there is work, else 0; when it "
            "keeps rising, a step hangs",
            client.step_age_s,
        )
        yield from _sequences(stats)
        yield from _tokens(stats)
        yield from _steps(stats)
        yield from each(counter, "", ENGINE_COUNTERS, stats)
        yield from each(gauge, "mlx_", MLX_GAUGES, stats.mlx, "_bytes")
        if stats.kv is not None:
            yield from _pool(stats.kv)
            yield from _slots(stats.kv.slots)


def _sequences(stats: EngineStats) -> Iterator[Metric]:
    yield gauge(
        "quire_requests_running",
        "Sequences, one per requested answer, that have been admitted and hold KV cache memory",
        stats.running,
    )
    yield gauge(
        "quire_requests_waiting",
        "Sequences, one per requested answer, that wait for admission: new ones and preempted ones",
        stats.waiting,
    )
    yield histogram(
        "quire_request_queue_seconds",
        "Seconds from a request's submission to the engine to the step that computes its "
        "first token",
        stats.measured.queue_seconds,
    )


def _tokens(stats: EngineStats) -> Iterator[Metric]:
    yield counter(
        "quire_prompt_tokens_submitted",
        "Prompt tokens of sequences that began to run, whether the prefix cache had them or not",
        stats.submitted_prompt_tokens,
    )
    yield counter(
        "quire_prompt_tokens_cached",
        "Prompt tokens that sequences found in the prefix cache when they began to run",
        stats.cached_prompt_tokens,
    )
    misses = dict(stats.prefix_misses)
    yield counters(
        "quire_prefix_misses",
        "Sequences that found less of their prompt in the prefix cache than it could "
        "hold, by reason",
        ("reason",),
        [((reason.value,), misses.get(reason, 0)) for reason in MissReason],
    )


def _steps(stats: EngineStats) -> Iterator[Metric]:
    measured = stats.measured
    yield histogram(
        "quire_step_seconds", "Seconds that each engine step took", measured.step_seconds
    )
    yield histogram(
        "quire_step_sequences",
        "Number of sequences that each engine step ran",
        measured.step_sequences,
    )
    yield gauge(
        "quire_step_duration_seconds",
        "Seconds that the newest engine step took",
        stats.step_seconds,
    )
    yield gauge(
        "quire_step_budget_tokens",
        "Prompt tokens that a step may compute beside decoding sequences, adapted to "
        "measured times",
        stats.token_budget,
    )
    yield counter(
        "quire_kv_copied_bytes",
        "KV cache bytes that were copied because several answers go on from one prompt",
        stats.copied_bytes,
    )


def _slots(slots: SlotStats) -> Iterator[Metric]:
    yield gauge(
        "quire_state_slots",
        "Slots, each with the states of all recurrent layers of one sequence at one position: the "
        "sum of free, held, cached and waiting; 0 where the model has no such layers",
        slots.slots,
    )
    yield from each(gauge, "state_slots_", SLOT_GAUGES, slots)
    yield gauges(
        "quire_state_slots_cached",
        "Slots that no sequence holds and that are kept for prefix hits, by why they are kept",
        ("keep",),
        [((keep,), count) for keep, count in slots.cached],
    )
    yield counter(
        "quire_state_slots_evicted",
        "Cached slots that were evicted, for room, after a while without use, or with their blocks",
        slots.evicted,
    )
    yield gauge("quire_state_slot_bytes", "Bytes of one slot", slots.slot_bytes)
    yield gauge(
        "quire_state_committed_bytes",
        "Bytes of slots that the operating system charges this process for, measured twice a "
        "second at most; they are part of quire_kv_committed_bytes",
        slots.committed_bytes,
    )


def _pool(kv: KVStats) -> Iterator[Metric]:
    yield from each(gauge, "kv_", POOL_GAUGES, kv, "_bytes")
    yield from each(counter, "kv_", POOL_COUNTERS, kv)
    yield gauge("quire_kv_block_tokens", "Tokens that one KV cache block holds", kv.block_tokens)
    yield gauge(
        "quire_kv_heaps",
        "Heaps that exist: large pieces of memory that KV cache blocks are allocated from",
        kv.num_heaps,
    )
    kept = (
        "Heaps that cannot be released to the operating system before the process ends: all or none"
    )
    yield gauge("quire_kv_heaps_kept", kept, kv.kept_heaps)
    yield counter(
        "quire_prefix_evicted_blocks",
        "Cached blocks that were evicted from the prefix cache, for room or after a "
        "while without use",
        kv.evicted_blocks,
    )
