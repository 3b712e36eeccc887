from dataclasses import replace
from typing import Any

import pytest

from kvcache.backends.choice import KVBackend
from kvcache.budget import (
    GIB,
    MIB,
    SMALLEST_CONTEXT_TOKENS,
    BudgetError,
    CacheRequest,
    MemoryDemand,
    MemoryPlan,
    fit,
    gib,
)
from kvcache.config import CacheSettings
from kvcache.layout import KVShape, KVSpec, LayoutError, StateSpec

SHAPE = KVShape.uniform(28, KVSpec(8, 128))  # 112 KiB per token
DEMAND = MemoryDemand(
    machine_bytes=16 * GIB,
    available_bytes=15 * GIB,
    headroom_bytes=4 * GIB,
    weights_bytes=2 * GIB,
    activation_bytes=256 * MIB,
    mlx_cache_bytes=256 * MIB,
)
REQUEST = CacheRequest(
    kv_backend=KVBackend.POSIX,
    settings=CacheSettings(),
    max_num_seqs=32,
    max_model_len=None,
    max_num_batched_tokens=2048,
)


def asked(
    request: CacheRequest = REQUEST, max_model_len: int | None = None, **settings: Any
) -> CacheRequest:
    """A request with these settings."""
    settings_ = replace(request.settings, **settings)
    return replace(request, settings=settings_, max_model_len=max_model_len)


def plan(
    demand: MemoryDemand = DEMAND,
    request: CacheRequest = REQUEST,
    model_max_len: int = 40960,
    shape: KVShape = SHAPE,
) -> MemoryPlan:
    return fit(demand, request, shape, model_max_len=model_max_len, system_page_bytes=4096)


def test_the_sum_is_exact() -> None:
    found = plan()
    heap = found.layout.groups[0].heap_bytes
    assert found.kv_budget_bytes == (16 - 4 - 2.5) * GIB // heap * heap
    assert found.max_model_len == 40960
    assert found.max_num_seqs == 32


def test_threat_21_memory_that_others_use_is_not_counted_on() -> None:
    found = plan(replace(DEMAND, available_bytes=6 * GIB))
    assert found.kv_budget_bytes <= 3.5 * GIB


def test_the_context_is_shortened_to_what_one_sequence_can_have() -> None:
    found = plan(replace(DEMAND, available_bytes=3 * GIB))
    group = found.layout.groups[0]
    assert found.max_model_len == found.kv_budget_bytes // group.bytes_per_token
    assert found.max_model_len < 5000
    assert group.max_tokens >= found.max_model_len


def test_no_more_is_planned_than_all_sequences_can_use() -> None:
    found = plan(request=replace(REQUEST, max_num_seqs=1), model_max_len=1000)
    assert found.kv_budget_bytes <= 1000 * SHAPE.bytes_per_token + 64 * MIB


def test_the_users_own_limits_win() -> None:
    request = asked(kv_budget_bytes=GIB, page_bytes=16384, max_model_len=2048)
    found = plan(request=request)
    assert found.kv_budget_bytes <= GIB
    assert found.max_model_len == 2048
    assert found.layout.groups[0].tokens_per_block == 8


@pytest.mark.parametrize(
    ("demand", "request_", "message"),
    [
        ({}, {"max_model_len": 50000}, "50000 tokens, but the model knows only 40960"),
        ({}, {"kv_budget_bytes": 20 * GIB}, r"20.00 GiB does not fit: .* 16.00 GiB, .* 2.50 GiB"),
        (
            {},
            {"kv_budget_bytes": GIB, "max_model_len": 40000},
            r"40000 tokens needs 4.27 GiB .* budget of 1.00 GiB holds",
        ),
        ({}, {"kv_budget_bytes": MIB}, r"1.00 MiB holds 0 tokens"),
        ({"weights_bytes": 12 * GIB}, {}, r"nothing is left .* weights take 12.00 GiB"),
        ({"available_bytes": GIB}, {}, r"nothing is left .* of 1.00 GiB usable"),
        (
            {"available_bytes": 5 * GIB // 2 + 1},
            {},
            r"1 bytes is left .* 2048 tokens needs 224.00 M",
        ),
        (
            {"available_bytes": 5 * GIB // 2 + 99 * MIB},
            {"max_model_len": 1000},
            r"99.00 MiB is left .* one sequence of 1000 tokens needs 109.38 MiB",
        ),
    ],
)
def test_threat_21_what_cannot_work_is_refused_with_the_figure_that_does_not_fit(
    demand: dict[str, int], request_: dict[str, int], message: str
) -> None:
    with pytest.raises(BudgetError, match=message):
        plan(replace(DEMAND, **demand), asked(**request_))  # type: ignore[arg-type]


ON_GPU = replace(DEMAND, machine_bytes=8 * GIB, headroom_bytes=3 * GIB // 2, on_gpu=True)


def test_on_a_gpu_what_is_available_now_limits_nothing() -> None:
    plans = [plan(replace(ON_GPU, available_bytes=now)) for now in (0, GIB, 8 * GIB)]
    assert {found.kv_budget_bytes for found in plans} == {plans[0].kv_budget_bytes}
    heap = plans[0].layout.groups[0].heap_bytes
    assert plans[0].kv_budget_bytes == 4 * GIB // heap * heap


def test_threat_21_a_tight_fit_is_told_with_what_is_missing_and_a_loose_one_is_not() -> None:
    found = plan(replace(ON_GPU, available_bytes=2 * GIB))
    wanted = found.layout.groups[0].heap_bytes + 5 * GIB // 2
    assert found.warning is not None
    for figure in (wanted, 2 * GIB, wanted - 2 * GIB):
        assert gib(figure) in found.warning
    assert plan(replace(ON_GPU, available_bytes=wanted)).warning is None
    assert plan(replace(ON_GPU, available_bytes=wanted - 1)).warning is not None
    assert plan(replace(DEMAND, available_bytes=6 * GIB)).warning is None, "a CPU takes no more"


def test_threat_21_a_cache_too_small_for_one_short_sequence_is_refused_with_what_would_help() -> (
    None
):
    least = SMALLEST_CONTEXT_TOKENS * SHAPE.bytes_per_token
    enough = replace(ON_GPU, weights_bytes=6 * GIB - least, available_bytes=0)
    with pytest.raises(BudgetError, match=r"2048 tokens needs .* 1728 tokens in whole heaps of 63"):
        plan(enough)
    heap = plan().layout.groups[0].heap_bytes
    whole = replace(ON_GPU, weights_bytes=6 * GIB - 4 * heap, available_bytes=0)
    assert SMALLEST_CONTEXT_TOKENS <= plan(whole).max_model_len == 4 * 576
    with pytest.raises(BudgetError) as caught:
        plan(replace(enough, weights_bytes=enough.weights_bytes + 1))
    said = str(caught.value)
    for word in (gib(least - 1), gib(least), "6.50 GiB usable", "a smaller model", "1.50 GiB now"):
        assert word in said
    for flag in ("--max-model-len", "--max-num-batched-tokens", "--headroom", "--kv-budget"):
        assert flag in said
    short = replace(REQUEST, max_model_len=2000)
    assert plan(whole, short).max_model_len == 2000
    own = asked(kv_budget_bytes=64 * MIB)
    assert plan(replace(enough, weights_bytes=7 * GIB), own).max_model_len < 600, "as he wants it"


ARENA = replace(REQUEST, kv_backend=KVBackend.METAL_DENSE, max_num_seqs=8)


@pytest.mark.parametrize(
    ("arena", "sequences", "model_max_len", "planned", "note"),
    [
        (None, 8, 40960, (11112, 8), None),
        (None, 64, 40960, (4096, 21), None),
        (64 * GIB, 8, 4096, (4096, 8), None),
        (5 * GIB, 8, 40960, (5848, 8), "device's largest is 5.00 GiB"),
        (2 * GIB, 8, 40960, (4096, 4), "leaves fewer sequences"),
    ],
)
def test_a_dense_context_is_shortened_for_more_sequences_while_it_is_usable(
    arena: int | None,
    sequences: int,
    model_max_len: int,
    planned: tuple[int, int],
    note: str | None,
) -> None:
    request = replace(ARENA, max_num_seqs=sequences, max_buffer_bytes=arena)
    found = plan(request=request, model_max_len=model_max_len)
    (group,) = found.layout.groups
    assert (found.max_model_len, found.max_num_seqs) == planned
    assert (group.blocks_per_buffer, group.page_bytes) == (1, 16384)
    assert arena is None or found.kv_budget_bytes == found.max_num_seqs * group.heap_bytes <= arena
    assert found.note is None if note is None else note in found.lines()[-1]


def test_a_limit_of_the_device_that_changes_nothing_is_not_spoken_of() -> None:
    request = replace(ARENA, max_buffer_bytes=GIB, max_model_len=1000, max_num_seqs=8)
    found = plan(request=request)
    assert (found.max_model_len, found.max_num_seqs, found.note) == (1000, 8, None)
    wide = plan(
        request=asked(replace(request, max_buffer_bytes=9 * 128 * MIB), 1000, heap_bytes=GIB)
    )
    assert wide.note is None


def test_a_context_that_no_allocation_of_the_device_can_hold_is_refused() -> None:
    request = replace(ARENA, max_buffer_bytes=GIB, max_model_len=20000)
    with pytest.raises(BudgetError, match=r"allocates no more at once: lower --max-model-len"):
        plan(request=request)


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED])
def test_metal_pages_are_of_the_sizes_that_the_device_maps(kv_backend: KVBackend) -> None:
    request = replace(REQUEST, kv_backend=kv_backend, max_buffer_bytes=MIB)
    found = plan(request=request)
    assert found.layout.groups[0].page_bytes == 65536
    assert found.kv_budget_bytes > GIB, "only an arena must be one allocation"
    with pytest.raises(LayoutError, match="a page of 32768 bytes is none that the device maps"):
        plan(request=asked(request, page_bytes=32768))


def test_the_sum_is_printed_line_by_line() -> None:
    text = "\n".join(plan().lines())
    for figure in (
        "16.00 GiB",
        "4.00 GiB",
        "2.00 GiB",
        "40960 tokens per sequence",
        "114688 bytes",
    ):
        assert figure in text


@pytest.mark.parametrize(
    ("amount", "text"), [(1, "1 bytes"), (3 * MIB // 2, "1.50 MiB"), (5 * GIB, "5.00 GiB")]
)
def test_sizes_are_written_for_people(amount: int, text: str) -> None:
    assert gib(amount) == text


HYBRID = replace(SHAPE, states=(StateSpec(16, 32, 128, 128, tail_rows=3),) * 24)
assert HYBRID.slot is not None
SLOT_BYTES = HYBRID.slot.slot_bytes


def test_states_take_a_third_of_the_memory() -> None:
    found, without = plan(shape=HYBRID), plan()
    states = found.num_slots * SLOT_BYTES
    assert (found.state_bytes, without.state_bytes) == (states, 0)
    assert states == pytest.approx(without.kv_budget_bytes / 3, rel=0.05)
    assert found.kv_budget_bytes + states <= 9.5 * GIB
    assert found.max_num_seqs == found.num_slots // 3 - 1 < 32
    assert any(line.startswith("states, at most") for line in found.lines())
    few = plan(request=asked(kv_budget_bytes=5 * SLOT_BYTES), shape=HYBRID)
    assert (few.num_slots, few.max_num_seqs) == (4, 1)
    with pytest.raises(BudgetError, match="the states of one sequence need 4 slots of"):
        plan(request=asked(kv_budget_bytes=4 * SLOT_BYTES), shape=HYBRID)


@pytest.mark.parametrize(
    ("room", "slots", "sequences"),
    [(4, 4, 1), (5, 5, 1), (6, 6, 2), (8, 8, 2), (9, 9, 2), (13, 12, 3), (14, 12, 3), (31, 30, 9)],
)
def test_the_slots_of_one_sequence_are_left_for_states_that_later_prompts_continue_from(
    room: int, slots: int, sequences: int
) -> None:
    budget = 3 * room * SLOT_BYTES + 1
    few = plan(request=asked(kv_budget_bytes=budget, max_model_len=64), shape=HYBRID)
    assert (few.num_slots, few.max_num_seqs) == (slots, sequences)


def test_a_context_that_is_asked_for_takes_memory_from_states_only_if_it_is_long() -> None:
    contexts = (512, 2048, 40_960, 60_000, 65_536, 73_721, 80_000, 85_000)
    plans = [plan(DEMAND, asked(max_model_len=n), 262144, HYBRID) for n in contexts]
    assert tuple(found.max_model_len for found in plans) == contexts
    assert all(found.kv_budget_bytes + found.state_bytes <= 9.5 * GIB for found in plans)
    assert plans[0].kv_budget_bytes < plans[2].kv_budget_bytes
    assert plans[0].num_slots == plans[2].num_slots > plans[-1].num_slots >= 4


def test_states_are_not_there_from_the_start_and_on_a_dense_gpu_in_one_buffer() -> None:
    def planned(kv_backend: KVBackend, demand: MemoryDemand = DEMAND) -> MemoryPlan:
        most = 20 * SLOT_BYTES
        request = replace(REQUEST, kv_backend=kv_backend, max_buffer_bytes=most)
        return plan(demand, request, 4096, HYBRID)

    sparse, dense = planned(KVBackend.SPARSE), planned(KVBackend.METAL_DENSE)
    assert dense.num_slots == 18 < sparse.num_slots
    from_start = sparse.demand.fixed_bytes + sparse.layout.heap_bytes
    tight = replace(DEMAND, on_gpu=True, available_bytes=from_start - 1)
    assert "a tight fit" in (planned(KVBackend.SPARSE, tight).warning or "")
    roomy = replace(tight, available_bytes=from_start)
    assert planned(KVBackend.SPARSE, roomy).warning is None


# --- a GPU's addresses --------------------------------------------------------------------------

ROOMY = replace(DEMAND, machine_bytes=80 * GIB, available_bytes=80 * GIB, on_gpu=True)


@pytest.mark.parametrize(
    ("contexts", "set_len", "sequences", "planned"),
    [
        (64, None, 32, (64, 40960, 32)),
        (50.5, None, 32, (50, 40960, 32)),
        (16.5, None, 32, (33, 20480, 32)),
        (2, None, 1000, (40, SMALLEST_CONTEXT_TOKENS, 39)),
        (33, 40960, 32, (33, 40960, 32)),
        (10.9, 40960, 32, (10, 40960, 9)),
        (0.5, 40960, 1, (2, 40960, 1)),
    ],
)
def test_spare_buffers_go_first_then_the_context_or_sequences_beside_a_context_that_is_set(
    contexts: float, set_len: int | None, sequences: int, planned: tuple[int, int, int]
) -> None:
    """contexts: how many whole ones have room in the addresses for K and V."""
    addresses = int(4 * contexts * 40960 * SHAPE.bytes_per_token)
    request = replace(asked(max_model_len=set_len), max_num_seqs=sequences, address_bytes=addresses)
    found = plan(ROOMY, replace(request, kv_backend=KVBackend.SPARSE))
    assert (found.max_buffers, found.max_model_len, found.max_num_seqs) == planned
    assert found.layout.max_tokens == found.max_model_len
    assert (found.note is None) == (planned[1:] == (40960, sequences))


@pytest.mark.parametrize("kind", [KVBackend.PAGED, KVBackend.METAL_DENSE, KVBackend.POSIX])
def test_only_sparse_buffers_take_addresses_of_a_gpu(kind: KVBackend) -> None:
    found = plan(ROOMY, replace(REQUEST, kv_backend=kind, address_bytes=GIB))
    assert (found.max_num_seqs, found.note) == (32, None)
    assert found.max_buffers == (32 if kind.is_dense else 64)


# Gemma 3 27B, gpt-oss-20b, and Gemma 4 26B-A4B: windows, layers that see all tokens.
WINDOWED = {
    "gemma-3-27b": ((KVSpec(16, 128, window=1024), 52), (KVSpec(16, 128), 10)),
    "gpt-oss-20b": ((KVSpec(8, 64, window=128), 12), (KVSpec(8, 64), 12)),
    "gemma-4-26b": ((KVSpec(8, 256, window=1024), 25), (KVSpec(2, 512), 5)),
}


def windowed(model: str) -> KVShape:
    return KVShape(tuple(spec for spec, layers in WINDOWED[model] for _ in range(layers)))


@pytest.mark.parametrize(
    ("model", "memory_gib", "tokens", "of_full_layers"),
    [
        ("gemma-3-27b", 11, 85_000, 25_000),
        ("gemma-3-27b", 32, 300_000, 70_000),
        ("gpt-oss-20b", 4, 150_000, 90_000),
        ("gemma-4-26b", 4, 100_000, 20_000),
        ("gemma-4-26b", 12, 380_000, 60_000),
    ],
)
def test_windows_take_a_third_at_most_and_the_context_has_the_rest(
    model: str, memory_gib: int, tokens: int, of_full_layers: int
) -> None:
    demand = replace(DEMAND, available_bytes=int((memory_gib + 2.5) * GIB), machine_bytes=99 * GIB)
    shape, request = windowed(model), replace(REQUEST, max_num_seqs=8)
    found = plan(demand, request, 131_072, shape)
    counts = found.layout.heap_blocks_within(found.kv_budget_bytes)
    sizes = [n * group.block_bytes for n, group in zip(counts, found.layout.groups, strict=True)]
    assert sum(sizes) == found.kv_budget_bytes <= memory_gib * GIB
    assert sizes[1] <= memory_gib * GIB / 3 + found.layout.heap_bytes
    assert found.max_model_len == min(131_072, found.kv_tokens)
    assert found.kv_tokens >= tokens
    assert plan(demand, request, 131_072, shape.without_windows()).kv_tokens <= of_full_layers
    window = WINDOWED[model][0][0].window
    assert f"{gib(sizes[1])} for windows of {window} tokens" in "\n".join(found.lines())


@pytest.mark.parametrize(("sequences", "tokens"), [(32, 18_000), (4, 131_072)])
def test_windows_leave_a_gpus_addresses_to_layers_that_need_a_context(
    sequences: int, tokens: int
) -> None:
    request = replace(asked(), kv_backend=KVBackend.SPARSE, max_num_seqs=sequences)
    request = replace(request, address_bytes=1 << 39)  # of an M1 or M2
    shape = windowed("gemma-3-27b")
    found = plan(ROOMY, request, 131_072, shape)
    full, window = found.layout.groups
    assert not full.has_ring
    assert window.most_blocks(131_072, request.max_num_batched_tokens) <= window.ring_blocks
    assert found.layout.address_bytes * (found.max_num_seqs + 1) <= 1 << 37
    assert (found.max_num_seqs, found.max_model_len >= tokens) == (sequences, True)
    assert plan(ROOMY, request, 131_072, shape.without_windows()).max_model_len < tokens / 2
    short = plan(ROOMY, replace(request, max_model_len=4096), 131_072, shape).layout.groups[1]
    assert short.address_bytes == short.block_bytes * short.blocks_per_buffer, "no ring is shorter"


@pytest.mark.parametrize("model", WINDOWED)
def test_sequences_are_as_many_as_windows_fit_beside_one_prompt(model: str) -> None:
    small = asked(kv_budget_bytes=8 * GIB, max_model_len=32_768)
    found = plan(request=small, shape=windowed(model))
    group = found.layout.groups[1]
    blocks = found.layout.heap_blocks_within(found.kv_budget_bytes)[1]
    needed = (found.max_num_seqs - 1) * group.kept_blocks(32_768) + group.most_blocks(32_768, 2048)
    assert needed <= blocks
    assert found.max_num_seqs == 32 or needed + group.kept_blocks(32_768) > blocks


@pytest.mark.parametrize("model", WINDOWED)
def test_windows_that_do_not_fit_take_no_more_than_other_layers(model: str) -> None:
    shape = windowed(model)
    found = plan(request=asked(kv_budget_bytes=1000 * shape.bytes_per_token), shape=shape)
    counts = found.layout.heap_blocks_within(found.kv_budget_bytes)
    assert counts[0] == counts[1]
    assert found.kv_tokens == found.max_model_len <= 1000


def test_a_model_of_windows_alone_has_the_whole_context() -> None:
    shape = KVShape.uniform(28, KVSpec(8, 128, window=4096))
    assert plan(shape=shape).max_model_len == 40960
    assert plan(request=asked(kv_budget_bytes=GIB // 4), shape=shape).max_model_len < 4096


@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_dense_memory_has_one_heap_for_each_sequence_and_no_more(sequences: int) -> None:
    request = replace(REQUEST, kv_backend=KVBackend.METAL_DENSE, max_num_seqs=sequences)
    found = plan(ROOMY, request, model_max_len=4096)
    assert found.kv_budget_bytes == sequences * found.layout.heap_bytes


def test_dense_memory_has_windows_of_the_whole_context() -> None:
    request = replace(REQUEST, kv_backend=KVBackend.METAL_DENSE)
    found, full = (
        plan(request=request, shape=s)
        for s in (windowed("gpt-oss-20b"), windowed("gpt-oss-20b").without_windows())
    )
    assert found == full
