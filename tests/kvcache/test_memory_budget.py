from dataclasses import replace

import pytest

from kvcache.layout import KVShape
from kvcache.memory_budget import (
    GIB,
    MIB,
    BudgetError,
    CacheRequest,
    MemoryDemand,
    MemoryPlan,
    fit,
    gib,
)

SHAPE = KVShape(num_layers=28, kv_heads=8, head_dim=128, itemsize=2)  # 112 KiB per token
DEMAND = MemoryDemand(
    machine_bytes=16 * GIB,
    available_bytes=15 * GIB,
    headroom_bytes=4 * GIB,
    weights_bytes=2 * GIB,
    activation_bytes=256 * MIB,
    mlx_cache_bytes=256 * MIB,
)
REQUEST = CacheRequest(
    substrate="posix",
    heap_bytes=64 * MIB,
    max_num_seqs=32,
    page_bytes=None,
    kv_budget_bytes=None,
    max_model_len=None,
)


def plan(
    demand: MemoryDemand = DEMAND, request: CacheRequest = REQUEST, model_max_len: int = 40960
) -> MemoryPlan:
    return fit(demand, request, SHAPE, model_max_len=model_max_len, system_page_bytes=4096)


def test_the_sum_is_exact() -> None:
    found = plan()
    heap = found.layout.group.heap_bytes
    assert found.kv_budget_bytes == (16 - 4 - 2.5) * GIB // heap * heap
    assert found.max_model_len == 40960
    assert found.max_num_seqs == 32


def test_memory_that_others_use_is_not_counted_on() -> None:
    found = plan(replace(DEMAND, available_bytes=6 * GIB))
    assert found.kv_budget_bytes <= 3.5 * GIB


def test_the_context_is_shortened_to_what_one_sequence_can_have() -> None:
    found = plan(replace(DEMAND, available_bytes=3 * GIB))
    group = found.layout.group
    assert found.max_model_len == found.kv_budget_bytes // group.bytes_per_token
    assert found.max_model_len < 5000
    assert group.max_tokens >= found.max_model_len


def test_no_more_is_planned_than_all_sequences_can_use() -> None:
    found = plan(request=replace(REQUEST, max_num_seqs=1), model_max_len=1000)
    assert found.kv_budget_bytes <= 1000 * SHAPE.bytes_per_token + 64 * MIB


def test_the_users_own_limits_win() -> None:
    request = replace(REQUEST, kv_budget_bytes=GIB, max_model_len=2048, page_bytes=16384)
    found = plan(request=request)
    assert found.kv_budget_bytes <= GIB
    assert found.max_model_len == 2048
    assert found.layout.group.tokens_per_block == 8


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
    ],
)
def test_what_cannot_work_is_refused_with_the_figure_that_does_not_fit(
    demand: dict[str, int], request_: dict[str, int], message: str
) -> None:
    with pytest.raises(BudgetError, match=message):
        plan(replace(DEMAND, **demand), replace(REQUEST, **request_))  # type: ignore[arg-type]


def test_a_dense_context_is_shortened_so_that_every_sequence_gets_a_buffer() -> None:
    found = plan(request=replace(REQUEST, substrate="dense", max_num_seqs=8))
    assert 4096 <= found.max_model_len < 40960
    assert found.max_num_seqs == 8
    assert found.layout.group.blocks_per_buffer == 1


def test_a_dense_context_is_not_shortened_below_a_usable_one() -> None:
    found = plan(request=replace(REQUEST, substrate="dense", max_num_seqs=64))
    assert found.max_model_len == 4096
    assert found.max_num_seqs < 64


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
