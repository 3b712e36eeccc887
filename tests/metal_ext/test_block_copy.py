import mlx.core as mx
import numpy as np
import pytest

from metal_ext import AddressRange, CopyCounter, Heap, block_copy
from tests.metal_ext.layers import KEY_REGION, PagedLayer, normal
from tests.metal_ext.shapes import Shape

SHAPE = Shape()  # regions of different sizes
REGIONS = range(len(SHAPE.rows))
TOKENS = SHAPE.tokens_per_block


def marked(count: int, seed: int) -> AddressRange:
    """A range with random bytes behind its first blocks."""
    made = SHAPE.mapped(count)
    draw = np.random.default_rng(seed)
    for block in range(count):
        for region in REGIONS:
            size = SHAPE.block_bytes(region)
            SHAPE.block(made, region, block)[:] = draw.integers(0, 256, size, dtype=np.uint8)
    return made


def content(range_: AddressRange, count: int) -> dict[tuple[int, int], bytes]:
    return {
        (region, block): SHAPE.block(range_, region, block).tobytes()
        for region in REGIONS
        for block in range(count)
    }


@pytest.mark.parametrize("tokens", [1, 7, TOKENS])
def test_the_first_rows_of_every_region_are_copied_and_nothing_else(tokens: int) -> None:
    source, target, counter = marked(3, 1), marked(2, 2), CopyCounter()
    from_, want = content(source, 3), content(target, 2)
    for region, row in enumerate(SHAPE.rows):
        cut = tokens * row
        want[region, 1] = from_[region, 2][:cut] + want[region, 1][cut:]
    mx.eval(block_copy(mx.zeros((1,)), source, 2, target, 1, tokens, counter))
    assert content(target, 2) == want
    assert content(source, 3) == from_
    assert counter.bytes == tokens * sum(SHAPE.rows)


def test_a_block_is_copied_within_one_range() -> None:
    range_ = marked(4, 3)
    before = content(range_, 4)
    mx.eval(block_copy(mx.zeros((1,)), range_, 0, range_, 3, TOKENS, CopyCounter()))
    for region in REGIONS:
        assert SHAPE.block(range_, region, 3).tobytes() == before[region, 0]
        assert SHAPE.block(range_, region, 0).tobytes() == before[region, 0]


def test_the_counter_counts_what_has_run_and_only_that() -> None:
    range_, counter, other = marked(2, 4), CopyCounter(), CopyCounter()
    token = block_copy(mx.zeros((1,)), range_, 0, range_, 1, 3, counter)
    assert counter.bytes == 0, "queued, not run"
    mx.eval(token)
    assert counter.bytes == 3 * sum(SHAPE.rows)
    mx.eval(block_copy(token, range_, 0, range_, 1, 5, counter))
    assert counter.bytes == 8 * sum(SHAPE.rows)
    assert other.bytes == 0


def test_a_copy_waits_for_the_rows_of_its_token() -> None:
    paged = PagedLayer((40, 40))
    rows = normal((3, 2, 32), mx.float32, 1)
    token = paged.append(rows, rows, paged.rows((0, 0, 3)))
    one, other = paged.ranges
    mx.eval(block_copy(token, one, 0, other, 0, 3, CopyCounter()))
    assert paged.numbers(0, KEY_REGION)[:3].any()
    assert np.array_equal(paged.numbers(1, KEY_REGION)[:3], paged.numbers(0, KEY_REGION)[:3])


def test_copies_between_different_geometries_are_refused() -> None:
    other = Shape(blocks_per_range=9).mapped(1)
    counter = CopyCounter()
    for source, target in ((marked(1, 5), other), (other, marked(1, 5))):
        with pytest.raises(ValueError, match="have different geometries"):
            block_copy(mx.zeros((1,)), source, 0, target, 0, 1, counter)
    assert counter.bytes == 0


def test_a_read_only_block_is_copied_from_and_never_to() -> None:
    heap, counter = Heap.shared(SHAPE.geometry()), CopyCounter()
    owner, sharer = SHAPE.mapped(2, heap), AddressRange.sparse(SHAPE.geometry())
    SHAPE.block(owner, 1, 0)[:] = 3
    sharer.map(heap, 0, 0, 2, writable=False)
    sharer.map(heap, 2, 2, 1, writable=True)
    for target, to in ((sharer, 0), (sharer, 1)):
        with pytest.raises(IndexError, match=f"target block {to} is read-only"):
            block_copy(mx.zeros((1,)), owner, 0, target, to, 1, counter)
    mx.eval(block_copy(mx.zeros((1,)), sharer, 0, sharer, 2, TOKENS, counter))
    assert (SHAPE.block(sharer, 1, 2) == 3).all()
    assert counter.bytes == TOKENS * sum(SHAPE.rows)


def test_blocks_without_memory_are_refused_before_anything_is_written() -> None:
    full, part, counter = marked(4, 6), marked(2, 7), CopyCounter()
    before = content(full, 4), content(part, 2)
    for source, from_, target, to, which in (
        (part, 2, full, 0, "source"),
        (full, 0, part, 2, "target"),
        (AddressRange.sparse(SHAPE.geometry()), 0, full, 0, "source"),
    ):
        with pytest.raises(IndexError, match=f"mapped {which} blocks"):
            block_copy(mx.zeros((1,)), source, from_, target, to, 1, counter)
    assert (content(full, 4), content(part, 2)) == before
    assert counter.bytes == 0
