import gc
import itertools
import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    CpuWorkers,
    RowTable,
    chunk_attention,
    decode_attention,
    instruction_sets,
)
from tests.metal_ext.layers import (
    DTYPES,
    KEY_REGION,
    VALUE_REGION,
    Floats,
    PagedLayer,
    exact,
    normal,
    same_bits,
)

KV_HEADS = 2
GROUPS = (1, 2, 3, 4, 6, 8)
HEAD_DIMS = (32, 64, 128, 256)
# Around the borders of tiles (64) and splits (256), and odd ones.
LENGTHS = (1, 2, 3, 5, 31, 63, 64, 65, 127, 255, 256, 257, 300, 517)
# Of sums in float32; K, V and queries are of size 1.
TOLERANCE = 5e-6

every_shape = pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        pytest.param(head_dim, group, dtype, id=f"{head_dim}-{group}-{name}")
        for (name, dtype), head_dim, group in itertools.product(DTYPES.items(), HEAD_DIMS, GROUPS)
    ],
)


def scale_of(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim)


def some_queries(rows: int, paged: PagedLayer, group: int, dtype: mx.Dtype) -> mx.array:
    return normal((rows, group * paged.kv_heads, paged.head_dim), dtype, 5)


def decode(
    paged: PagedLayer,
    queries: mx.array,
    rows: RowTable,
    first_row: int = 0,
    workers: CpuWorkers | None = None,
) -> mx.array:
    scale = scale_of(paged.head_dim)
    return decode_attention(
        paged.token,
        queries,
        rows,
        first_row,
        paged.layer,
        paged.kv_heads,
        scale,
        workers or paged.workers,
    )


def chunk(
    paged: PagedLayer,
    queries: mx.array,
    rows: RowTable,
    segment: int = 0,
    workers: CpuWorkers | None = None,
) -> mx.array:
    scale = scale_of(paged.head_dim)
    return chunk_attention(
        paged.token,
        queries,
        rows,
        segment,
        paged.layer,
        paged.kv_heads,
        scale,
        workers or paged.workers,
    )


def error_of(got: mx.array, want: list[Floats]) -> float:
    return float(np.abs(exact(got) - np.stack(want)).max())


@every_shape
def test_decode_attention_is_what_float64_says(head_dim: int, group: int, dtype: mx.Dtype) -> None:
    paged = PagedLayer(LENGTHS, kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    queries = some_queries(len(LENGTHS), paged, group, mx.float32)
    want = [
        paged.expected(s, length - 1, query, scale_of(head_dim))
        for (s, length), query in zip(enumerate(LENGTHS), exact(queries), strict=True)
    ]
    assert error_of(decode(paged, queries, paged.newest()), want) < TOLERANCE


@every_shape
def test_chunk_attention_is_what_float64_says(head_dim: int, group: int, dtype: mx.Dtype) -> None:
    paged = PagedLayer((301,), kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    for start, count in ((0, 1), (0, 35), (60, 7), (240, 61)):
        queries = some_queries(count, paged, group, mx.float32)
        want = [
            paged.expected(0, start + i, query, scale_of(head_dim))
            for i, query in enumerate(exact(queries))
        ]
        rows = paged.rows((0, start, count))
        assert error_of(chunk(paged, queries, rows), want) < TOLERANCE, (start, count)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@every_shape
def test_a_row_has_the_same_bits_alone_in_a_batch_in_a_chunk_and_on_more_threads(
    head_dim: int, group: int, dtype: mx.Dtype, instruction_set: str
) -> None:
    one, three = (CpuWorkers(threads, instruction_set) for threads in (1, 3))
    paged = PagedLayer((700, 401, 7), kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    segments = ((0, 680, 20), (1, 243, 33), (2, 6, 1), (0, 699, 1))
    rows = paged.rows(*segments)
    queries = some_queries(len(rows), paged, group, dtype)
    batch = decode(paged, queries, rows, workers=one)
    assert same_bits(decode(paged, queries, rows, workers=three), batch)
    first = 0
    for number, (sequence, start, count) in enumerate(segments):
        part = slice(first, first + count)
        for workers in (one, three):
            together = chunk(paged, queries[part], rows, number, workers)
            assert same_bits(together, batch[part]), (number, workers.threads)
        row = count // 2
        alone = queries[first + row][None]
        table = paged.rows((sequence, start + row, 1))
        assert same_bits(decode(paged, alone, table, workers=three)[0], batch[first + row])
        assert same_bits(chunk(paged, alone, table, workers=one)[0], batch[first + row])
        first += count


def test_few_rows_of_a_long_past_have_the_same_bits_on_any_number_of_threads() -> None:
    paged = PagedLayer((9001, 3), head_dim=64, dtype=mx.bfloat16).fill()
    queries = some_queries(2, paged, 4, mx.float32)
    alone = decode(paged, queries, paged.newest(), workers=CpuWorkers(1))
    want = [paged.expected(0, 9000, exact(queries)[0], scale_of(64))]
    assert error_of(alone[:1], want) < TOLERANCE
    for threads in (2, 5):
        again = decode(paged, queries, paged.newest(), workers=CpuWorkers(threads))
        assert same_bits(again, alone)


@pytest.mark.parametrize("attend", [decode, chunk])
def test_bfloat16_queries_give_the_rounded_answer_of_the_same_queries_in_float32(
    attend: Callable[[PagedLayer, mx.array, RowTable], mx.array],
) -> None:
    paged = PagedLayer((90,), dtype=mx.bfloat16).fill()
    rows = paged.rows((0, 70, 20))
    queries = some_queries(20, paged, 3, mx.bfloat16)
    narrow = attend(paged, queries, rows)
    wide = attend(paged, queries.astype(mx.float32), rows)
    assert wide.dtype == mx.float32
    assert same_bits(narrow, wide.astype(mx.bfloat16))


@pytest.mark.parametrize("attend", [decode, chunk])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_queries_may_have_any_strides(
    attend: Callable[[PagedLayer, mx.array, RowTable], mx.array], dtype: mx.Dtype
) -> None:
    paged = PagedLayer((40,), dtype=dtype).fill()
    rows = paged.rows((0, 31, 9))
    queries = some_queries(9, paged, 2, dtype)
    plain = attend(paged, queries, rows)
    for order in itertools.permutations(range(3)):
        back = [order.index(axis) for axis in range(3)]
        moved = mx.contiguous(queries.transpose(*order)).transpose(*back)
        assert same_bits(attend(paged, moved, rows), plain), order
    assert same_bits(attend(paged, mx.contiguous(queries[::-1])[::-1], rows), plain)


def test_queries_may_be_a_part_of_the_tables_rows() -> None:
    paged = PagedLayer(LENGTHS).fill()
    queries = some_queries(len(LENGTHS), paged, 2, mx.float32)
    whole = decode(paged, queries, paged.newest())
    part = decode(paged, queries[4:9], paged.newest(), first_row=4)
    assert same_bits(part, whole[4:9])


def test_threat_16_a_row_does_not_see_what_stands_behind_it() -> None:
    paged = PagedLayer((200,)).fill()
    queries = some_queries(30, paged, 2, mx.float32)
    rows = paged.rows((0, 100, 30))
    before = [decode(paged, queries, rows), chunk(paged, queries, rows)]
    mx.eval(before)
    for region in (KEY_REGION, VALUE_REGION):
        paged.bits(0, region)[130:] = 0x7FC00000
    for attend, was in zip((decode, chunk), before, strict=True):
        assert same_bits(attend(paged, queries, rows), was)
    paged.bits(0, VALUE_REGION)[129] = 0x7FC00000  # the positive control
    for attend, was in zip((decode, chunk), before, strict=True):
        now = attend(paged, queries, rows)
        assert same_bits(now[:29], was[:29])
        assert bool(mx.isnan(now[29]).all())


def test_a_scale_of_nothing_gives_the_mean_of_the_values() -> None:
    paged = PagedLayer((75,)).fill()
    queries = some_queries(1, paged, 1, mx.float32)
    mean = paged.numbers(0, VALUE_REGION)[:75].mean(axis=0)
    rows, layer, workers = paged.newest(), paged.layer, paged.workers
    for got in (
        decode_attention(paged.token, queries, rows, 0, layer, KV_HEADS, 0.0, workers),
        chunk_attention(paged.token, queries, rows, 0, layer, KV_HEADS, 0.0, workers),
    ):
        assert error_of(got, [mean]) < TOLERANCE


def test_attention_that_takes_the_newest_token_sees_rows_that_are_still_queued() -> None:
    paged, filled = PagedLayer((60,)), PagedLayer((60,)).fill()
    keys, values = (normal((60, 2, 32), mx.float32, seed) for seed in (1, 2))
    answers = []
    for row in range(60):
        here = slice(row, row + 1)
        paged.append(keys[here], values[here], paged.rows((0, row, 1)))
        answers.append(decode(paged, keys[here], paged.rows((0, row, 1))))
    want = chunk(filled, keys, filled.rows((0, 0, 60)))
    assert same_bits(mx.concatenate(answers), want)


def test_queued_attention_keeps_all_that_it_uses_alive() -> None:
    paged = PagedLayer((60,)).fill()
    queries = some_queries(1, paged, 2, mx.float32)
    want = decode(paged, queries, paged.newest())
    mx.eval(want)
    queued = [decode(paged, queries, paged.newest()), chunk(paged, queries, paged.newest())]
    del paged, queries
    gc.collect()
    assert same_bits(queued[0], want)
    assert same_bits(queued[1], want)
