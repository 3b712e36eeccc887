import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    CpuWorkers,
    Mapper,
    RowTable,
    Softmax,
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


def softmax_of(paged: PagedLayer, **changes: Any) -> Softmax:
    return Softmax(1 / math.sqrt(paged.head_dim), **changes)


def some_queries(rows: int, paged: PagedLayer, group: int, dtype: mx.Dtype) -> mx.array:
    return normal((rows, group * paged.kv_heads, paged.head_dim), dtype, 5)


def decode(
    paged: PagedLayer,
    queries: mx.array,
    rows: RowTable,
    first_row: int = 0,
    workers: CpuWorkers | None = None,
    softmax: Softmax | None = None,
) -> mx.array:
    return decode_attention(
        paged.token,
        queries,
        rows,
        first_row,
        paged.layer,
        paged.kv_heads,
        softmax or softmax_of(paged),
        workers or paged.workers,
    )


def chunk(
    paged: PagedLayer,
    queries: mx.array,
    rows: RowTable,
    segment: int = 0,
    workers: CpuWorkers | None = None,
    softmax: Softmax | None = None,
) -> mx.array:
    return chunk_attention(
        paged.token,
        queries,
        rows,
        segment,
        paged.layer,
        paged.kv_heads,
        softmax or softmax_of(paged),
        workers or paged.workers,
    )


def error_of(got: mx.array, want: list[Floats]) -> float:
    return float(np.abs(exact(got) - np.stack(want)).max())


@every_shape
def test_decode_attention_is_what_float64_says(head_dim: int, group: int, dtype: mx.Dtype) -> None:
    paged = PagedLayer(LENGTHS, kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    queries = some_queries(len(LENGTHS), paged, group, mx.float32)
    want = [
        paged.expected(s, length - 1, query, softmax_of(paged))
        for (s, length), query in zip(enumerate(LENGTHS), exact(queries), strict=True)
    ]
    assert error_of(decode(paged, queries, paged.newest()), want) < TOLERANCE


@every_shape
def test_chunk_attention_is_what_float64_says(head_dim: int, group: int, dtype: mx.Dtype) -> None:
    paged = PagedLayer((301,), kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    for start, count in ((0, 1), (0, 35), (60, 7), (240, 61)):
        queries = some_queries(count, paged, group, mx.float32)
        want = [
            paged.expected(0, start + i, query, softmax_of(paged))
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


WINDOWS = (1, 2, 33, 64, 100, 129, 256, 300, 1000)
"""Around the borders of tiles and splits; the last hides nothing."""


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(32, 3), (64, 8), (128, 1), (256, 2)])
def test_windows_sinks_and_softcaps_are_what_float64_says_in_chunks_and_alone(
    head_dim: int, group: int, dtype: mx.Dtype, instruction_set: str
) -> None:
    workers = CpuWorkers(2, instruction_set)
    paged = PagedLayer((600,), kv_heads=KV_HEADS, head_dim=head_dim, dtype=dtype).fill()
    sinks = 3 * normal((group * KV_HEADS,), mx.float32, 7)
    for number, (start, count) in enumerate(((0, 70), (243, 35), (300, 40), (599, 1))):
        queries = 2 * some_queries(count, paged, group, mx.float32)
        rows = paged.rows((0, start, count))
        for window in WINDOWS:
            softmax = softmax_of(
                paged,
                window=window,
                softcap=0.0 if number % 2 else 1.5,
                sinks=sinks if number % 3 else None,
            )
            together = chunk(paged, queries, rows, 0, workers, softmax)
            alone = decode(paged, queries, rows, 0, workers, softmax)
            assert same_bits(together, alone), (start, window)
            some = range(0, count, 7)
            want = [paged.expected(0, start + i, exact(queries[i]), softmax) for i in some]
            got = mx.stack([alone[i] for i in some])
            assert error_of(got, want) < TOLERANCE, (start, window)


@pytest.mark.parametrize("attend", [decode, chunk])
def test_memory_before_a_window_is_not_read(attend: Callable[..., mx.array]) -> None:
    paged = PagedLayer((600,), dtype=mx.bfloat16).fill()
    per_block = paged.shape.tokens_per_block
    rows, mapper = paged.rows((0, 560, 40)), Mapper()
    queries, softmax = some_queries(40, paged, 2, mx.float32), softmax_of(paged, window=100)
    before = attend(paged, queries, rows, softmax=softmax)
    mx.eval(before)
    gone = (560 - 99) // per_block
    assert gone > 0
    assert mapper.wait(mapper.unmap(paged.ranges[0], 0, gone), 10)  # reading it ends the process
    assert same_bits(attend(paged, queries, rows, softmax=softmax), before)
    rows, mapped = paged.rows((0, 560, 40)), 561 - gone * per_block
    assert same_bits(attend(paged, queries, rows, softmax=softmax), before)
    for window in (mapped + 1, 600, None):
        with pytest.raises(IndexError, match=f"rows can see {mapped} tokens"):
            attend(paged, queries, rows, softmax=softmax_of(paged, window=window))


def test_a_row_does_not_see_what_stands_before_its_window() -> None:
    paged = PagedLayer((300,)).fill()
    queries, rows = some_queries(60, paged, 2, mx.float32), paged.rows((0, 240, 60))
    softmax = softmax_of(paged, window=50)
    for attend in (decode, chunk):
        was = attend(paged, queries, rows, softmax=softmax)
        for region in (KEY_REGION, VALUE_REGION):
            kept = paged.bits(0, region)[220].copy()
            mx.eval(was)
            paged.bits(0, region)[220] = 0x7FC00000  # seen by the rows up to position 269
            now = attend(paged, queries, rows, softmax=softmax)
            assert bool(mx.isnan(now[:30]).all())
            assert same_bits(now[30:], was[30:])
            paged.bits(0, region)[220] = kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": -1.0}, "softcap must be a positive number"),
        ({"softcap": math.inf}, "softcap must be a positive number"),
        ({"sinks": mx.zeros((2, 2))}, r"sinks must be float32 \[query_heads\]"),
        ({"sinks": mx.zeros((4,), mx.bfloat16)}, r"sinks must be float32 \[query_heads\]"),
    ],
)
def test_a_softmax_of_wrong_numbers_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Softmax(1.0, **changes)


def test_there_is_a_sink_for_each_query_head() -> None:
    paged = PagedLayer((3,)).fill()
    queries, softmax = (
        some_queries(1, paged, 2, mx.float32),
        softmax_of(paged, sinks=mx.zeros((3,))),
    )
    with pytest.raises(ValueError, match="there are 3 sinks for 4 query heads"):
        decode(paged, queries, paged.newest(), softmax=softmax)


def test_few_rows_of_a_long_past_have_the_same_bits_on_any_number_of_threads() -> None:
    paged = PagedLayer((9001, 3), head_dim=64, dtype=mx.bfloat16).fill()
    queries = some_queries(2, paged, 4, mx.float32)
    alone = decode(paged, queries, paged.newest(), workers=CpuWorkers(1))
    want = [paged.expected(0, 9000, exact(queries)[0], softmax_of(paged))]
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
        decode_attention(paged.token, queries, rows, 0, layer, KV_HEADS, Softmax(0.0), workers),
        chunk_attention(paged.token, queries, rows, 0, layer, KV_HEADS, Softmax(0.0), workers),
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
