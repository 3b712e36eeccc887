import pytest

from tests.metal_ext.shapes import PAGE, Shape

SHAPE = Shape()
# (what, the changes, what the error must say)
BAD_COMBINATIONS = [
    ("a page that is half of the system's", {"page_bytes": PAGE // 2}, "page_bytes is"),
    ("a page and a half", {"page_bytes": PAGE * 3 // 2}, "page_bytes is"),
    ("rows that fill no page", {"rows": (PAGE // 16, 80)}, "16 rows of 80 bytes"),
    ("a block of half a page", {"tokens_per_block": 8}, "8 rows of"),
    ("pages larger than a block", {"page_bytes": 4 * PAGE}, "16 rows of"),
]


def test_a_geometry_adds_up() -> None:
    geometry = SHAPE.geometry()
    assert geometry.block_bytes == 4 * PAGE
    assert geometry.heap_bytes == 8 * 4 * PAGE
    assert geometry.range_bytes == 8 * 4 * PAGE
    assert geometry.max_tokens == 8 * 16


def test_heaps_and_ranges_may_differ_in_length() -> None:
    geometry = SHAPE.geometry(blocks_per_heap=3, blocks_per_range=1000)
    assert geometry.heap_bytes == 3 * geometry.block_bytes
    assert geometry.range_bytes == 1000 * geometry.block_bytes
    assert geometry.max_tokens == 16000


def test_the_largest_range_is_2_to_the_46() -> None:
    largest = {"tokens_per_block": 2**20, "rows": (2**20,), "blocks_per_heap": 1}
    assert SHAPE.geometry(**largest, blocks_per_range=64).range_bytes == 2**46
    with pytest.raises(IndexError, match="blocks_per_range is 65; it must lie between 1 and 64"):
        SHAPE.geometry(**largest, blocks_per_range=65)
    with pytest.raises(IndexError, match="blocks_per_heap is 65; it must lie between 1 and 64"):
        SHAPE.geometry(**largest | {"blocks_per_heap": 65}, blocks_per_range=1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [(c, s) for _, c, s in BAD_COMBINATIONS],
    ids=[b[0] for b in BAD_COMBINATIONS],
)
def test_a_combination_that_cannot_work_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SHAPE.geometry(**changes)


@pytest.mark.parametrize("count", [0, 4097])
def test_the_number_of_regions_is_bounded(count: int) -> None:
    with pytest.raises(IndexError, match=f"number of regions is {count}"):
        SHAPE.geometry(rows=(PAGE // 16,) * count)
