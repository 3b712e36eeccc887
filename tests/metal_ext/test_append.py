import gc

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import AddressRange, CpuWorkers, RowTable, append
from tests.metal_ext.layers import (
    DTYPES,
    KEY_REGION,
    REGIONS,
    VALUE_REGION,
    PagedLayer,
    exact,
    normal,
)
from tests.metal_ext.shapes import PAGE

PATTERN = 0xA5
# Bits of float32 and of the bfloat16 nearest to it; of two as near, the even one.
ROUNDED = {
    0x00000000: 0x0000,
    0x80000000: 0x8000,
    0x3F808000: 0x3F80,  # halfway: down to even
    0x3F818000: 0x3F82,  # halfway: up to even
    0x3F807FFF: 0x3F80,
    0x3F808001: 0x3F81,
    0x3FFFFFFF: 0x4000,  # into the next exponent
    0x7F7FFFFF: 0x7F80,  # beyond the largest: infinity
    0x7F800000: 0x7F80,
    0xFF800000: 0xFF80,
    0x00000001: 0x0000,
    0x00008001: 0x0001,  # the smallest there is
    0x7F800001: 0x7FC0,  # a NaN whose own bits would round to infinity
    0xFFC12345: 0x7FC0,
}


def bits_of(x: mx.array, dtype: mx.Dtype) -> np.ndarray:
    """What MLX itself makes of x as dtype."""
    return np.array(x.astype(dtype).view({2: mx.uint16, 4: mx.uint32}[dtype.size]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("given", DTYPES.values(), ids=[f"given {name}" for name in DTYPES])
@pytest.mark.parametrize("kept", DTYPES.values(), ids=[f"kept {name}" for name in DTYPES])
def test_rows_land_at_their_places_and_nothing_else_changes(
    given: mx.Dtype, kept: mx.Dtype, threads: int
) -> None:
    paged = PagedLayer((40, 200, 90, 5), dtype=kept, workers=CpuWorkers(threads))
    segments = ((1, 17, 150), (3, 4, 1), (0, 0, 40), (2, 63, 3))  # sequence, start, count
    for sequence in range(4):
        for region in range(REGIONS):
            paged.memory(sequence, region)[:] = PATTERN
    want = {(s, r): paged.bits(s, r).copy() for s in range(4) for r in range(REGIONS)}
    rows = paged.rows(*segments)
    keys, values = (normal((len(rows), 2, 32), given, seed) for seed in (1, 2))
    mx.eval(paged.append(keys, values, rows))
    first = 0
    for sequence, start, count in segments:
        for region, array in ((KEY_REGION, keys), (VALUE_REGION, values)):
            part = bits_of(array[first : first + count], kept)
            want[sequence, region][start : start + count] = part
        first += count
    for (sequence, region), bits in want.items():
        assert np.array_equal(paged.bits(sequence, region), bits), (sequence, region)


def test_rounding_is_to_nearest_even_and_every_nan_is_one() -> None:
    paged = PagedLayer((1,), dtype=mx.bfloat16)
    row = np.zeros((1, 2, 32), np.uint32)
    row.ravel()[: len(ROUNDED)] = list(ROUNDED)
    keys = mx.array(row).view(mx.float32)
    mx.eval(paged.append(keys, keys, paged.newest()))
    for region in (KEY_REGION, VALUE_REGION):
        written = paged.bits(0, region)[0].ravel()[: len(ROUNDED)]
        assert [hex(bits) for bits in written] == [hex(bits) for bits in ROUNDED.values()]


def strided(x: mx.array) -> dict[str, mx.array]:
    """Equal arrays whose numbers lie elsewhere."""
    padded = mx.pad(x, [(0, 1), (1, 1), (3, 2)])
    mx.eval(padded)
    return {
        "a slice of a larger array": padded[:-1, 1:-1, 3:-2],
        "transposed heads": mx.contiguous(x.transpose(1, 0, 2)).transpose(1, 0, 2),
        "dimensions outermost": mx.contiguous(x.transpose(2, 1, 0)).transpose(2, 1, 0),
        "backwards": mx.contiguous(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
        "not computed yet": (x + 0.0).astype(x.dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_keys_and_values_may_have_any_strides(dtype: mx.Dtype) -> None:
    rows = normal((9, 2, 32), dtype, 3)
    for name, keys in strided(rows).items():
        paged = PagedLayer((9,), dtype=dtype)
        mx.eval(
            paged.append(keys, mx.broadcast_to(rows[:1, :1, :1], (9, 2, 32)), paged.rows((0, 0, 9)))
        )
        assert np.array_equal(paged.numbers(0, KEY_REGION)[:9], exact(rows)), name
        assert (paged.numbers(0, VALUE_REGION)[:9] == exact(rows)[0, 0, 0]).all(), name


def test_the_token_is_as_it_was_and_the_old_one_stays_usable() -> None:
    paged = PagedLayer((2,))
    first = mx.array([7], dtype=mx.int32)
    row = normal((1, 2, 32), mx.float32)
    one = append(first, row, row, paged.rows((0, 0, 1)), paged.layer, paged.workers)
    other = append(first, row, row, paged.rows((0, 1, 1)), paged.layer, paged.workers)
    mx.eval(one, other)
    for token in (first, one, other):
        assert (token.shape, token.dtype, token.item()) == ((1,), mx.int32, 7)
    assert np.array_equal(paged.numbers(0, KEY_REGION)[:2], exact(row)[[0, 0]])


def test_nothing_is_written_before_evaluation() -> None:
    paged = PagedLayer((1,))
    row = normal((1, 2, 32), mx.float32)
    token = paged.append(row, row, paged.newest())
    assert paged.heap.committed_bytes == 0
    mx.eval(token)
    assert paged.heap.committed_bytes > 0


def test_a_queued_append_keeps_all_that_it_uses_alive() -> None:
    paged = PagedLayer((3,))
    heap, row = paged.heap, normal((3, 2, 32), mx.float32)
    token = paged.append(row * 2, row * 3, paged.rows((0, 0, 3)))
    del paged, row
    gc.collect()
    mx.eval(token)
    assert heap.committed_bytes > 0


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([(0, 5)], r"segment \[0, 0 \+ 5\) cannot be written: block 0 is read-only"),
        ([(31, 2)], r"segment \[31, 31 \+ 2\) cannot be written: block 1 is read-only"),
        ([(32, 3), (16, 1)], r"segment \[16, 16 \+ 1\) cannot be written: block 1 is read-only"),
    ],
)
def test_rows_of_read_only_blocks_are_refused_before_anything_is_written(
    segments: list[tuple[int, int]], says: str
) -> None:
    head_dim = PAGE // (16 * 2 * 4)  # of two heads: 16 tokens a page
    paged = PagedLayer((16 * 4,), head_dim=head_dim).fill()
    before, sharer = paged.snapshot(), AddressRange.sparse(paged.shape.geometry())
    sharer.map(paged.heap, 0, 0, 2, writable=False)
    sharer.map(paged.heap, 2, 2, 1, writable=True)
    rows = RowTable([(sharer, start, count) for start, count in segments])
    new = normal((len(rows), 2, head_dim), mx.float32, 5)
    with pytest.raises(IndexError, match=says):
        append(paged.token, new, new, rows, paged.layer, paged.workers)
    assert paged.snapshot() == before
    mx.eval(
        append(
            paged.token, new[:1], new[:1], RowTable([(sharer, 32, 1)]), paged.layer, CpuWorkers(1)
        )
    )
    assert paged.snapshot() != before
