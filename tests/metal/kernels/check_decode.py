"""decode_split and decode_combine against float64, and against themselves in other company."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.kernels.attend import Shape, attend, expected, filled, random_queries
from tests.metal.kernels.device import SHORT_ROW_TOKENS, SHORT_SPLIT_TOKENS, SPLIT_TOKENS, Device
from tests.metal.kernels.formats import FORMATS
from tests.metal.kernels.store import KINDS

# Half a unit in the last place of numbers below 4, and the float32 arithmetic before it.
ROUNDING = {"float": 1e-5, "half": 1e-3 + 1e-5, "bfloat": 8e-3}
GROUPS = (1, 3, 4, 5, 6, 7, 8, 9, 16)
DIMS = (64, 128, 256)
# Every pair of formats over every kind of rows; head_dim and the group take turns.
COVER = [
    Shape(
        t, kv, DIMS[(i + i // 3) % 3], kind, (4, 6, 8, 1, 5, 7, 12)[i % 7] * (1 + i % 2), 1 + i % 2
    )
    for i, (t, kv, kind) in enumerate(product(FORMATS, FORMATS, KINDS))
]
SMALL = [
    Shape("bfloat", "bfloat", 64, "sparse", 4, 2),
    Shape("float", "float", 128, "dense", 18, 2),
    Shape("half", "bfloat", 256, "paged", 14, 2),
]


def small(shapes: list[Shape]) -> list[object]:
    """The shapes as parameters of small tests."""
    return [pytest.param(shape, marks=pytest.mark.small, id=f"small-{shape}") for shape in shapes]


def edges(shape: Shape) -> list[int]:
    """Lengths at and beside the ends of blocks and splits."""
    block = shape.store([1]).tokens_per_block
    split, short = SPLIT_TOKENS, SHORT_SPLIT_TOKENS
    near = {1, 2, block - 1, block, block + 1, short, short + 1, split - 1, split, split + 1}
    near |= {3 * short, 3 * short + 1, 2 * split + block}
    return sorted(length for length in near if length > 0)


def last_rows(lengths: list[int]) -> list[tuple[int, int]]:
    """Each sequence's last row."""
    return [(sequence, length - 1) for sequence, length in enumerate(lengths)]


def largest_error(
    device: Device, shape: Shape, lengths: list[int], spread: float = 1.0, seed: int = 0
) -> float:
    """Of each sequence's last row over a random store."""
    store = filled(shape, lengths, spread, seed)
    rows = last_rows(lengths)
    queries = random_queries(shape, len(rows), spread, seed + 1)
    found = shape.number.decode(attend(device, shape, store, queries, rows))
    return float(np.abs(found - expected(shape, store, queries, rows)).max())


@pytest.mark.parametrize("shape", [*small(SMALL), *COVER], ids=str)
def test_lengths_at_the_edges_of_blocks_and_splits(device: Device, shape: Shape) -> None:
    error = largest_error(device, shape, edges(shape))
    assert error <= ROUNDING[shape.activations]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_otherwise_from_a_length_on(device: Device, kind: str) -> None:
    shape = Shape("bfloat", "bfloat", 64, kind)
    lengths = [SHORT_ROW_TOKENS + beyond for beyond in (-1, 0, 1, SPLIT_TOKENS)]
    assert largest_error(device, shape, lengths) <= ROUNDING["bfloat"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_any_number_of_query_heads_shares_a_kv_head(
    device: Device, kv_heads: int, head_dim: int, group: int
) -> None:
    shape = Shape("float", "float", head_dim, "sparse", group * kv_heads, kv_heads)
    assert largest_error(device, shape, [300]) <= ROUNDING["float"]


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_head_has_the_same_bits_in_every_tile(device: Device, name: str, head_dim: int) -> None:
    lengths = [3, 130, 300, SHORT_ROW_TOKENS + 9]
    one = Shape(name, name, head_dim, "sparse", 1, 1)
    store, rows = filled(one, lengths, 2.0), last_rows(lengths)
    queries = random_queries(replace(one, query_heads=max(GROUPS)), len(rows), 2.0)
    alone = [attend(device, one, store, queries[:, [h]], rows) for h in range(max(GROUPS))]
    for group in GROUPS:
        shape = replace(one, query_heads=group)
        together = attend(device, shape, store, queries[:, :group].copy(), rows)
        assert np.array_equal(together, np.concatenate(alone[:group], axis=1)), group


@pytest.mark.parametrize("kind", KINDS)
def test_one_long_sequence_beside_seven_short_ones(device: Device, kind: str) -> None:
    shape = Shape("bfloat", "bfloat", 64, kind)
    lengths = [10, 10, 8000, 10, 10, 10, 10, 10]
    assert largest_error(device, shape, lengths) <= ROUNDING["bfloat"]


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_that_lie_far_apart(
    device: Device, name: str, head_dim: int, figures: list[str]
) -> None:
    shape = Shape(name, name, head_dim, "sparse", 8, 2)
    lengths = [7, 100, 1000, 2000]
    store = filled(shape, lengths, 3.0)
    rows = last_rows(lengths)
    queries = random_queries(shape, len(rows), 3.0)
    asked, keys = shape.number.decode(queries[3]), store.number.decode(store.rows(3, 0)[:2000])
    logits = np.einsum("hd,nd->hn", asked[:4], keys[:, 0]) * shape.scale
    found = shape.number.decode(attend(device, shape, store, queries, rows))
    error = float(np.abs(found - expected(shape, store, queries, rows)).max())
    figures.append(
        f"decode, {name:6} head_dim {head_dim:3}, logits from {logits.min():4.0f} to "
        f"{logits.max():3.0f}: error {error:.1e}"
    )
    assert logits.max() - logits.min() > 50
    assert error <= ROUNDING[name]


@pytest.mark.parametrize("name", ["float", "bfloat"])
def test_it_is_what_mlx_computes(device: Device, name: str, figures: list[str]) -> None:
    shape = Shape(name, name, 128, "sparse", 8, 2)
    store = filled(shape, [777], 1.0)
    queries = random_queries(shape, 1, 1.0)
    wide = [store.number.decode(store.rows(0, which)[:777]) for which in (0, 1)]
    keys, values = (mx.array(x.astype(np.float32)).swapaxes(0, 1)[None] for x in wide)
    asked = mx.array(shape.number.decode(queries).astype(np.float32))[:, :, None]
    wanted = mx.fast.scaled_dot_product_attention(asked, keys, values, scale=shape.scale)
    found = shape.number.decode(attend(device, shape, store, queries, [(0, 776)]))
    error = float(np.abs(found - np.array(wanted)[:, :, 0]).max())
    figures.append(f"decode, {name:6} head_dim 128: differs from MLX by {error:.1e}")
    assert error <= ROUNDING[name]


@pytest.mark.parametrize("shape", small(SMALL))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: Device, shape: Shape) -> None:
    lengths = [300, 5, 513, SHORT_ROW_TOKENS + 9]
    store = filled(shape, lengths, 2.0)
    one_split = [(1, 4), (2, 255), (0, 3), (3, 127)]
    several = [(0, 299), (2, 512), (2, 256), (3, SHORT_ROW_TOKENS - 1), (3, SHORT_ROW_TOKENS)]
    rows = [row for pair in zip(several, one_split, strict=False) for row in pair] + several[4:]
    few = attend(device, shape, store, random_queries(shape, 4, 2.0), one_split)
    assert not np.isnan(shape.number.decode(few)).any(), "nothing was left to combine"
    queries = random_queries(shape, len(rows), 2.0)
    together = attend(device, shape, store, queries, rows, before=3)
    for i, row in enumerate(rows):
        alone = attend(device, shape, store, queries[i : i + 1], [row])
        assert np.array_equal(alone[0], together[i]), row


@pytest.mark.parametrize("shape", small(SMALL))
def test_the_order_of_threadgroups_and_simdgroups_changes_no_bit(
    ordered: Device, shape: Shape
) -> None:
    lengths = [300, 40]
    store = filled(shape, lengths, 2.0)
    rows = last_rows(lengths)
    queries = random_queries(shape, len(rows), 2.0)
    first = attend(ordered, shape, store, queries, rows)
    for seed in range(1, 4):
        ordered.set_order(seed)
        assert np.array_equal(attend(ordered, shape, store, queries, rows), first), seed


@pytest.mark.parametrize("shape", small(SMALL))
@pytest.mark.parametrize("window", [1, 100, 128, 129, 257, 600])
def test_windows_sinks_and_softcaps(device: Device, shape: Shape, window: int) -> None:
    sinks = tuple(np.linspace(-3.0, 4.0, shape.query_heads).tolist())
    for changes in ({}, {"softcap": 2.0}, {"sinks": sinks}, {"softcap": 2.0, "sinks": sinks}):
        its = replace(shape, window=window, **changes)
        error = largest_error(device, its, [1, 99, 130, 500, SHORT_ROW_TOKENS + 300], 1.5)
        assert error <= ROUNDING[shape.activations], changes


@pytest.mark.small
def test_rows_before_a_window_are_not_read(device: Device) -> None:
    shape = replace(SMALL[0], window=70)
    store = filled(shape, [300], 2.0)
    queries = random_queries(shape, 1, 2.0)
    before = attend(device, shape, store, queries, [(0, 299)])
    for which in (0, 1):
        rows = store.number.decode(store.rows(0, which)[:300])
        rows[:230] = np.nan
        store.write(0, which, rows)
    assert np.array_equal(attend(device, shape, store, queries, [(0, 299)]), before)
    assert not np.isnan(shape.number.decode(before)).any()


@pytest.mark.small
def test_rows_behind_the_position_are_not_read(device: Device) -> None:
    shape = SMALL[0]
    store = filled(shape, [100], 2.0)
    queries = random_queries(shape, 1, 2.0)
    before = attend(device, shape, store, queries, [(0, 59)])
    tail = np.full((100, shape.kv_heads, shape.head_dim), np.nan)
    for which in (0, 1):
        kept = store.number.decode(store.rows(0, which)[:60])
        store.write(0, which, np.concatenate([kept, tail[60:]]))
    assert np.array_equal(attend(device, shape, store, queries, [(0, 59)]), before)
    assert not np.isnan(shape.number.decode(before)).any()
