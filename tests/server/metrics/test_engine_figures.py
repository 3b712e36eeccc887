from collections import Counter
from dataclasses import replace

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.figures import MlxMemory, StepMeter
from engine.types import Drafting, EngineStats, MissReason
from kvcache.stats import DiskStats
from server.metrics.engine_figures import EngineCollector
from tests.engines import BLOCK_BYTES
from tests.server.harness import (
    CHAT,
    Engine,
    chat,
)
from tests.server.metrics.scraping import Samples, client_with, pool, samples_of, scrape, value


def shown(stats: EngineStats, *, step_age_s: float = 0.0) -> Samples:
    registry = CollectorRegistry()
    registry.register(EngineCollector(client_with(stats, step_age_s=step_age_s)))
    return samples_of(generate_latest(registry).decode())


async def test_memory_is_charged_while_it_is_used(http: httpx2.AsyncClient) -> None:
    await http.post(CHAT, json=chat(max_tokens=100))
    samples = await scrape(http)
    assert 0 < pool(samples, "committed") <= 2 * pool(samples, "capacity")
    assert pool(samples, "block") == BLOCK_BYTES
    assert value(samples, "quire_kv_block_tokens") == 16
    assert value(samples, "quire_kv_heaps") >= 1
    assert value(samples, "quire_kv_heaps_kept") == 0
    assert value(samples, "quire_kv_mapped_blocks_total") > 0


async def test_counters_rise_with_the_work(http: httpx2.AsyncClient) -> None:
    before = await scrape(http)
    usage = (await http.post(CHAT, json=chat(max_tokens=9))).json()["usage"]
    names = {
        "quire_prompt_tokens_total": usage["prompt_tokens"],
        "quire_prompt_tokens_submitted_total": usage["prompt_tokens"],
        "quire_generated_tokens_total": 9,
        "quire_steps_total": 9,
        "quire_step_seconds_count": 9,
        "quire_step_sequences_sum": 9,
        "quire_request_queue_seconds_count": 1,
        "quire_failed_rows_total": 0,
        "quire_wasted_rows_total": 0,
    }
    after = before
    for _ in range(200):
        after = await scrape(http)
        if value(after, "quire_steps_total") >= value(before, "quire_steps_total") + 9:
            break
    for name, amount in names.items():
        assert value(after, name) - value(before, name) == amount, name
    assert value(after, "quire_step_duration_seconds") > 0
    assert value(after, "quire_step_budget_tokens") > 0
    assert value(after, "quire_mlx_peak_bytes") >= value(after, "quire_mlx_active_bytes") > 0


def test_what_came_from_the_cache_is_counted_and_misses_have_their_reasons() -> None:
    samples = shown(
        EngineStats(
            submitted_prompt_tokens=64,
            cached_prompt_tokens=48,
            prefix_misses=Counter({MissReason.EVICTED: 3, MissReason.NO_STATE: 1}),
            mapping_waits=5,
        )
    )
    assert value(samples, "quire_prompt_tokens_submitted_total") == 64
    assert value(samples, "quire_prompt_tokens_cached_total") == 48
    assert value(samples, "quire_prefix_misses_total", reason="never_cached") == 0
    assert value(samples, "quire_prefix_misses_total", reason="evicted") == 3
    assert value(samples, "quire_prefix_misses_total", reason="no_state") == 1
    assert value(samples, "quire_mapping_waits_total") == 5
    empty = shown(EngineStats())
    assert sum(name == "quire_prefix_misses_total" for name, _ in empty) == len(MissReason)


def test_drafts_are_counted_and_those_that_were_right() -> None:
    samples = shown(EngineStats(drafted_tokens=9, accepted_tokens=7))
    assert value(samples, "quire_drafted_tokens_total") == 9
    assert value(samples, "quire_accepted_tokens_total") == 7


@pytest.mark.parametrize("state", Drafting)
def test_one_of_the_states_of_drafting_is_1(state: Drafting) -> None:
    samples = shown(EngineStats(drafting=state))
    found = {each: value(samples, "quire_drafting", state=each.name.lower()) for each in Drafting}
    assert found == dict.fromkeys(Drafting, 0) | {state: 1}


def test_steps_mlx_and_age_are_shown_as_the_engine_has_them() -> None:
    meter = StepMeter()
    meter.step_ran(0.03, 4)
    meter.left_queue(3.0)
    stats = EngineStats(measured=meter.snapshot, mlx=MlxMemory(1, 2, 3))
    samples = shown(stats, step_age_s=7.5)
    assert value(samples, "quire_step_seconds_bucket", le="0.05") == 1
    assert value(samples, "quire_step_seconds_bucket", le="0.02") == 0
    assert value(samples, "quire_step_sequences_sum") == 4
    assert value(samples, "quire_request_queue_seconds_sum") == 3
    names = ("active", "cache", "peak")
    assert [value(samples, f"quire_mlx_{name}_bytes") for name in names] == [1, 2, 3]
    assert value(samples, "quire_engine_step_age_seconds") == 7.5


def test_prefixes_on_disk_are_shown() -> None:
    samples = shown(EngineStats(disk=DiskStats(5, 100, read_bytes=2, written_bytes=3, failures=4)))
    names = ("held_bytes", "read_bytes_total", "written_bytes_total", "failures_total")
    assert [value(samples, f"quire_disk_{name}") for name in names] == [5, 2, 3, 4]


async def test_what_the_pool_counts_shows(engine: Engine) -> None:
    kv = engine.client.stats.kv
    assert kv is not None
    counted = replace(
        kv,
        kept_heaps=7,
        shared_saved_bytes=4096,
        evicted_blocks=3,
        mapped_blocks=20,
        unmapped_blocks=9,
    )
    samples = shown(EngineStats(kv=counted))
    assert value(samples, "quire_kv_heaps_kept") == 7
    assert value(samples, "quire_kv_shared_saved_bytes") == 4096
    assert value(samples, "quire_prefix_evicted_blocks_total") == 3
    assert value(samples, "quire_kv_mapped_blocks_total") == 20
    assert value(samples, "quire_kv_unmapped_blocks_total") == 9
