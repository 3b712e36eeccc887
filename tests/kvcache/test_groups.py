"""A cache whose layers keep rows of two shapes: a sequence has as much in each group."""

from dataclasses import replace
from typing import Any

import pytest

import metal_ext
from kvcache.backends.backend import PageBackend
from kvcache.backends.choice import KVBackend
from kvcache.backends.new import new_backends
from kvcache.backends.posix import system_heap_limit, system_mapping_limit
from kvcache.budget import CacheLimits, CacheRequest, MemoryDemand, fit
from kvcache.config import CacheSettings
from kvcache.layout import KVFormat, KVShape, KVSpec, paged_layout
from kvcache.manager import KVCacheManager
from tests.kvcache.managers import (
    BLOCK,
    TOKENS,
    complete_steps,
    full_group,
    grow,
    join,
    manager,
    two_groups,
)
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory

HEAPS = 4
IDS = list(range(100))
LAYOUT = two_groups()


def cache(fail_at: int = 0, **changes: Any) -> tuple[KVCacheManager, list[StrictMemory]]:
    """Memories that refuse the same call. changes: their fields."""
    faults = MemoryFaults(fail_at=fail_at)
    memories = [StrictMemory(group, faults=faults, **changes) for group in LAYOUT.groups]
    backends: list[PageBackend] = [*memories]
    return manager(LAYOUT, backends, budget_bytes=HEAPS * LAYOUT.heap_bytes), memories


def settle(kv: KVCacheManager, memories: list[StrictMemory]) -> None:
    for _ in range(3):
        complete_steps(kv)
        for memory in memories:
            memory.complete()
    complete_steps(kv)
    kv.check_invariants()


def mapped(memories: list[StrictMemory]) -> list[dict[tuple[int, int], tuple[int, int]]]:
    return [dict(memory.mapped) for memory in memories]


def write(kv: KVCacheManager, seq_id: int, count: int) -> None:
    """A sequence computes all of its prompt that it does not share, and the steps complete."""
    start = kv.attach_cached(seq_id)
    kv.step_completed(grow(kv, seq_id, start, count - start, IDS))


def test_a_prefix_is_shared_in_every_group() -> None:
    kv, memories = cache()
    assert join(kv, 1, IDS[:40])
    write(kv, 1, 40)
    assert join(kv, 2, IDS[:48])
    assert kv.attach_cached(2) == 32
    for memory in memories:
        shared = [memory.mapped[0, block] for block in range(2)]
        assert shared == [memory.mapped[1, block] for block in range(2)]
        assert memory.copied_bytes == 0
    assert kv.stats().shared_saved_bytes == 2 * LAYOUT.block_bytes


def test_a_fork_copies_the_partial_block_of_every_group() -> None:
    kv, memories = cache()
    for seq_id in (1, 2):
        assert join(kv, seq_id, IDS[:40])
    write(kv, 1, 40)
    assert kv.fork(1, 2) == 39
    assert [memory.copies for memory in memories] == [1, 1]
    assert kv.copied_bytes == 7 * LAYOUT.bytes_per_token


def test_the_figures_are_those_of_all_groups() -> None:
    kv, memories = cache()
    assert join(kv, 1, IDS[:40])
    write(kv, 1, 40)
    stats = kv.stats()
    assert (stats.num_sequences, stats.block_tokens) == (1, TOKENS)
    assert stats.block_bytes == LAYOUT.block_bytes
    assert stats.capacity_bytes == HEAPS * LAYOUT.heap_bytes
    assert stats.live_bytes == 40 * LAYOUT.bytes_per_token
    assert stats.committed_bytes == sum(memory.committed_bytes() for memory in memories)
    maps = kv.memory_map().groups
    assert [each.geometry["block_bytes"] for each in maps] == [g.block_bytes for g in LAYOUT.groups]


SPEC = KVSpec(1, 64, KVFormat.FLOAT32)
SHORT, LONG = replace(SPEC, window=24), replace(SPEC, window=300)


@pytest.mark.parametrize(
    ("layers", "budget_blocks", "tokens"),
    [
        ((SPEC,), 100, (1600, 112, 96)),
        ((SPEC, replace(SPEC, head_dim=128)), 300, (1600, 112, 96)),
        ((SPEC, SHORT), 130, (1536, 112, 96)),
        ((SPEC, SPEC, SHORT, LONG), 253, (1408, 112, 96)),
        ((SPEC, LONG), 40, (320, 112, 96)),
        # Windows alone fit, for a whole context: in use are 5 blocks of 33, then 6 are cached.
        ((SHORT,), 100, (640, 640 * 5 // 33, 640 * 6 // 33)),
    ],
)
def test_as_many_tokens_fit_as_were_planned_and_a_share_of_them_is_used(
    layers: tuple[KVSpec, ...], budget_blocks: int, tokens: tuple[int, int, int]
) -> None:
    settings = CacheSettings(kv_budget_bytes=budget_blocks * BLOCK, heap_bytes=BLOCK)
    request = CacheRequest(KVBackend.POSIX, settings, 4, None, 32)
    demand = MemoryDemand(1 << 30, 1 << 30, 0, 0, 0, 0)
    plan = fit(demand, request, KVShape(layers), model_max_len=640, system_page_bytes=4096)
    memories = [StrictMemory(group) for group in plan.layout.groups]
    limits = CacheLimits(plan.kv_budget_bytes, 4, 8, settings, 32)
    kv = KVCacheManager(plan.layout, [*memories], limits, identity=b"test")
    assert join(kv, 1, IDS)
    for start in range(0, 96, 32):
        kv.step_completed(grow(kv, 1, start, 32, IDS))
    busy = kv.stats()
    kv.close(1)
    settle(kv, memories)
    assert (busy.capacity_tokens, busy.used_tokens, kv.stats().cached_tokens) == tokens
    assert plan.kv_tokens == tokens[0]


def test_the_group_that_has_least_says_how_far_a_prefix_goes() -> None:
    kv, memories = cache()
    assert join(kv, 1, IDS[:64])
    write(kv, 1, 64)
    kv.close(1)
    settle(kv, memories)
    assert full_group(kv, 1).prefixes.evict(), "what the system refused to one group alone"
    assert join(kv, 2, IDS[:65])
    assert kv.attach_cached(2) == 48
    assert kv.explain(2)[0] == 48
    write(kv, 2, 65)
    settle(kv, memories)


@pytest.mark.parametrize("fail_at", range(1, 28))
def test_fault_04_what_the_system_refuses_to_one_group_can_be_asked_for_again(fail_at: int) -> None:
    kv, memories = cache(fail_at)
    for seq_id, count in ((1, 40), (2, 48), (3, 20)):
        before = mapped(memories)
        if not join(kv, seq_id, IDS[:count], final=90):
            assert mapped(memories) == before
            kv.step_completed(0)
            assert join(kv, seq_id, IDS[:count], final=90)
        start = kv.attach_cached(seq_id)
        assert kv.reserve(seq_id, count) or kv.reserve(seq_id, count)
        kv.step_completed(grow(kv, seq_id, start, count - start, IDS))
    for seq_id in (1, 2, 3):
        assert kv.reserve(seq_id, 80) or kv.reserve(seq_id, 80)
        kv.check_invariants()
        kv.close(seq_id)
    settle(kv, memories)
    assert mapped(memories) == [{}, {}]


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_fault_04_a_prefix_that_one_group_cannot_map_is_attached_in_none(fail_at: int) -> None:
    kv, memories = cache()
    assert join(kv, 1, IDS[:40])
    assert join(kv, 2, IDS[:48])
    write(kv, 1, 40)
    memories[0].faults.fail_at = memories[0].faults.calls + fail_at
    before = mapped(memories)
    if not kv.attach_cached(2):
        assert mapped(memories) == before
    kv.check_invariants()
    assert kv.attach_cached(2) == 32
    settle(kv, memories)


@pytest.mark.parametrize("count", [1, TOKENS, TOKENS + 1, 40, 64])
def test_a_sequence_that_fits_in_one_group_alone_is_not_opened_and_leaves_nothing_to_wait_for(
    count: int,
) -> None:
    kv, memories = cache()
    assert join(kv, 1, IDS[:40])
    write(kv, 1, 40)
    memories[1].mapping_limit = 4
    before = mapped(memories)
    for _ in range(10):
        assert not join(kv, 2, IDS[:count])
        assert not kv.recovering, "whoever waits would wait for ever"
        assert mapped(memories) == before
        kv.check_invariants()
    assert memories[0].buffers == 2


def test_groups_share_what_the_system_allows_a_process() -> None:
    workers, page = metal_ext.CpuWorkers(1), metal_ext.SYSTEM_PAGE_BYTES
    layout = paged_layout(
        LAYOUT.shape, max_tokens=320, heap_bytes=64 * page, system_page_bytes=page
    )
    backends = new_backends(
        KVBackend.POSIX, layout.groups, max_buffers=4, release_heaps=False, workers=workers
    )
    for of_one, whole in (
        ([backend.mapping_limit for backend in backends], system_mapping_limit()),
        ([backend.heap_limit for backend in backends], system_heap_limit()),
    ):
        assert of_one == [None if whole is None else whole // 2] * 2
