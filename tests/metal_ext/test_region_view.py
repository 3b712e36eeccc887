import gc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import AddressRange, Heap, region_view
from tests.metal_ext.layers import DTYPES, KEY_REGION, VALUE_REGION, PagedLayer, normal, same_bits
from tests.metal_ext.shapes import PAGE, Shape


def view(paged: PagedLayer, region: int, tokens: int, sequence: int = 0) -> mx.array:
    heads, range_ = paged.kv_heads, paged.ranges[sequence]
    return region_view(paged.token, range_, region, tokens, heads, paged.head_dim, paged.dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_view_is_the_rows_of_its_region(dtype: mx.Dtype) -> None:
    paged = PagedLayer((100, 50), dtype=dtype)
    keys, values = (normal((150, 2, 32), dtype, seed) for seed in (1, 2))
    paged.append(keys, values, paged.rows((0, 0, 100), (1, 0, 50)))
    for tokens in (1, 49, 50):  # of the queued rows: a view waits for its token
        assert same_bits(view(paged, KEY_REGION, tokens, 1), keys[100 : 100 + tokens])
        assert same_bits(view(paged, VALUE_REGION, tokens), values[:tokens])
    assert not bool(view(paged, 0, 100).any()), "another layer's region is empty"


def test_a_view_is_no_copy() -> None:
    paged = PagedLayer((100,)).fill()
    keys = view(paged, KEY_REGION, 100)
    mx.eval(keys)
    shown = np.array(keys, copy=False)
    address = paged.ranges[0].base_address + paged.shape.offset(KEY_REGION, 0)
    assert shown.ctypes.data == address
    paged.memory(0, KEY_REGION)[:4] = np.array([4.5], np.float32).view(np.uint8)
    assert shown[0, 0, 0] == 4.5


def test_a_region_may_be_seen_in_any_shape_and_dtype_that_fill_its_rows() -> None:
    paged = PagedLayer((3,)).fill()
    range_ = paged.ranges[0]
    whole = region_view(paged.token, range_, KEY_REGION, 3, 1, 64, mx.float32)
    raw = region_view(paged.token, range_, KEY_REGION, 3, 256, 1, mx.uint8)
    assert same_bits(whole.reshape(3, 2, 32), view(paged, KEY_REGION, 3))
    assert np.array(raw).tobytes() == paged.memory(0, KEY_REGION)[: 3 * 256].tobytes()


def test_a_view_keeps_the_addresses_and_their_memory_alive() -> None:
    paged = PagedLayer((100,)).fill()
    want = mx.array(view(paged, KEY_REGION, 100))
    mx.eval(want)
    seen, queued = view(paged, KEY_REGION, 100), view(paged, KEY_REGION, 100)
    mx.eval(seen)
    del paged
    gc.collect()
    assert same_bits(seen, want)
    assert same_bits(queued, want)


# What MLX computes in the place of an argument that nobody else holds.
IN_PLACE: dict[str, Callable[[mx.array], mx.array]] = {
    "exp": mx.exp,
    "add": lambda x: x + 1,
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "norm": lambda x: mx.fast.rms_norm(x, None, 1e-5),
    "sort": lambda x: mx.sort(x, axis=-1),
    "cumulative sum": lambda x: mx.cumsum(x, axis=0),
    "scatter": lambda x: x.at[0].add(mx.ones((2, 32))),
    "slice": lambda x: mx.slice_update(x, mx.zeros((1, 2, 32)), mx.array([0]), [0]),
    "where": lambda x: mx.where(x > 0, x, mx.array(-1.0)),
    "view": lambda x: mx.exp(x.view(mx.int32).view(mx.float32)),
    "reshape": lambda x: mx.exp(x.reshape(-1)),
}


@pytest.mark.parametrize("compute", IN_PLACE.values(), ids=IN_PLACE)
def test_computing_with_a_view_never_writes_into_the_cache(
    compute: Callable[[mx.array], mx.array],
) -> None:
    # One region, all of it seen: as like a buffer of MLX's own as a view can be.
    shape = Shape(PAGE, PAGE // 256, 1, 1, (256,))
    range_ = shape.mapped(1)
    block = shape.block(range_, 0, 0)
    block[:] = np.random.default_rng(0).normal(size=PAGE // 4).astype(np.float32).view(np.uint8)
    before = block.tobytes()
    mx.eval(compute(region_view(mx.zeros((1,)), range_, 0, PAGE // 256, 2, 32, mx.float32)))
    assert block.tobytes() == before


def test_a_dense_range_can_be_seen_too() -> None:
    shape = Shape(PAGE, PAGE // 256, 1, 1, (256, 256))
    geometry = shape.geometry()
    range_ = AddressRange.dense(geometry)
    with pytest.raises(IndexError, match=r"mapped tokens .* does not lie inside \[0, 0\)"):
        region_view(mx.zeros((1,)), range_, 1, 1, 2, 32, mx.float32)
    range_.map(Heap.dense(geometry), 0, 0, 1, writable=True)
    shape.block(range_, 1, 0)[:] = np.ones(PAGE // 4, np.float32).view(np.uint8)
    seen = region_view(mx.zeros((1,)), range_, 1, PAGE // 256, 2, 32, mx.float32)
    assert mx.sum(seen).item() == PAGE // 4


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [(2, 32, mx.bfloat16), (1, 32, mx.float32), (2, 64, mx.float32), (2, 32, mx.complex64)],
)
def test_a_shape_that_does_not_fill_the_rows_is_refused(
    kv_heads: int, head_dim: int, dtype: mx.Dtype
) -> None:
    paged = PagedLayer((3,))
    with pytest.raises(ValueError, match="region 2 has rows of 256 bytes"):
        region_view(paged.token, paged.ranges[0], KEY_REGION, 1, kv_heads, head_dim, dtype)
