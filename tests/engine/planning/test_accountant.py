import sys
from collections.abc import Iterable

import pytest

from engine.planning.accountant import (
    MEAN_LENGTHS,
    PAGE_SIZES,
    TABLE_ENTRY_BYTES,
    account,
    block_account,
    tail_tokens,
)
from engine.planning.devices import CPU, find_device
from kvcache.block import Block, PageTable, SparseBuffer
from kvcache.layout import KVShape, KVSpec, paged_layout

KIB = 1024
QWEN3_4B = KVShape.uniform(36, KVSpec(8, 128))
HEAP_BYTES = 64 * KIB * KIB


def table(blocks: Iterable[Block]) -> PageTable:
    made = PageTable()
    made.append(blocks, writable=True)
    return made


@pytest.mark.parametrize(("block", "mean"), [(1, 5), (2, 1), (32, 256), (32, 10), (128, 1000)])
def test_the_tail_is_the_exact_mean_over_all_lengths(block: int, mean: int) -> None:
    tails = [-length % block for length in range(1, 2 * mean)]
    assert tail_tokens(block, mean) == pytest.approx(sum(tails) / len(tails))


def test_long_sequences_waste_half_a_block() -> None:
    assert tail_tokens(32, 100_000) == pytest.approx(15.5, abs=0.01)


def test_a_larger_page_wastes_more_and_is_mapped_less_often() -> None:
    accounts = account(QWEN3_4B, CPU, HEAP_BYTES)
    assert [a.page_bytes for a in accounts[:: len(MEAN_LENGTHS)]] == list(PAGE_SIZES)
    for mean in MEAN_LENGTHS:
        lines = [a for a in accounts if a.mean_tokens == mean]
        waste = [a.waste for a in lines]
        assert waste == sorted(waste)
        times = [a.mapping_s_per_token for a in lines]
        assert times == sorted(times, reverse=True)
        tables = [a.table_bytes for a in lines]
        assert tables == sorted(tables, reverse=True)


def test_the_block_of_qwen3_4b_is_accounted_for() -> None:
    layout = paged_layout(QWEN3_4B, max_tokens=4096, heap_bytes=HEAP_BYTES, system_page_bytes=4096)
    line = block_account(layout, layout.groups[0].page_bytes, CPU, 4096)
    assert (line.page_bytes, line.tokens_per_block) == (64 * KIB, 32)
    assert line.mappings_scattered == 72 * 128
    assert line.mappings_merged == 72 * 10, "14 blocks of a heap are one mapping per region"
    assert line.mapping_s_per_token == pytest.approx(72 * 3.2e-6 / 32)


def test_the_mappings_are_those_of_the_page_table() -> None:
    """But for the gap behind the last block, which the table counts as one more."""
    layout = paged_layout(QWEN3_4B, max_tokens=4096, heap_bytes=HEAP_BYTES, system_page_bytes=4096)
    line = block_account(layout, layout.groups[0].page_bytes, CPU, 1024)
    full = layout.groups[0].blocks_per_heap
    merged = table(Block(n // full, n % full) for n in range(32))
    scattered = table(Block(0, 2 * n) for n in range(32))
    assert SparseBuffer(0, merged).mappings(72) - 72 == line.mappings_merged
    assert SparseBuffer(0, scattered).mappings(72) - 72 == line.mappings_scattered


def test_a_batch_of_metal_mappings_costs_the_same_whatever_is_in_it() -> None:
    device = find_device("M4")
    assert device is not None
    line = account(QWEN3_4B, device, HEAP_BYTES)[0]
    assert line.tokens_per_block == 2
    assert line.mapping_s_per_token == pytest.approx(0.15e-3 / 2)


def test_the_table_costs_what_python_takes_for_it() -> None:
    empty, full = PageTable(), table(Block(1000, n) for n in range(1000))
    grown = sys.getsizeof(full.blocks) - sys.getsizeof(empty.blocks)
    grown += sum(sys.getsizeof(block) for block in full.blocks)
    assert grown == pytest.approx(1000 * TABLE_ENTRY_BYTES, rel=0.1)


def test_a_page_that_a_row_does_not_divide_is_left_out() -> None:
    wide = KVShape.uniform(2, KVSpec(8, 512))
    assert {a.page_bytes for a in account(wide, CPU, HEAP_BYTES)} == set(PAGE_SIZES[1:])
