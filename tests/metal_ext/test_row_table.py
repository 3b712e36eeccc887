import pytest

from metal_ext import AddressRange, Heap, Mapper, RowTable
from tests.metal_ext.shapes import Shape, unmapped

SHAPE = Shape()


def test_a_table_has_as_many_rows_as_its_segments() -> None:
    one, other = SHAPE.mapped(2), SHAPE.mapped(8)
    assert len(RowTable([(one, 0, 1)])) == 1
    assert len(RowTable([(one, 31, 1), (other, 0, 128), (one, 3, 7)])) == 136


def test_a_table_without_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="a row table needs at least one segment"):
        RowTable([])


def test_rows_without_memory_are_refused_in_any_segment() -> None:
    full, part = SHAPE.mapped(8), SHAPE.mapped(2)
    for bad in ((part, 32, 1), (part, 31, 2), (part, 0, 33)):
        for segments in ([bad], [(full, 0, 5), bad], [bad, (full, 0, 5)]):
            with pytest.raises(IndexError, match=r"does not lie inside \[0, 32\)"):
                RowTable(segments)


def test_rows_behind_a_gap_are_refused() -> None:
    range_ = SHAPE.mapped(8)
    unmapped(Mapper(), range_, 1, 1)
    assert len(RowTable([(range_, 0, 16)])) == 16
    with pytest.raises(IndexError, match="segment of mapped tokens"):
        RowTable([(range_, 40, 1)])


def test_ranges_of_different_geometries_do_not_share_a_table() -> None:
    other = Shape(blocks_per_range=9).mapped(1)
    with pytest.raises(ValueError, match="the ranges of a row table must have one geometry"):
        RowTable([(SHAPE.mapped(1), 0, 1), (other, 0, 1)])


def test_a_dense_range_has_rows_while_it_has_a_heap() -> None:
    geometry = SHAPE.geometry(blocks_per_heap=1, blocks_per_range=1)
    range_ = AddressRange.dense(geometry)
    with pytest.raises(IndexError, match=r"does not lie inside \[0, 0\)"):
        RowTable([(range_, 0, 1)])
    range_.map(Heap.dense(geometry), 0, 0, 1, writable=True)
    assert len(RowTable([(range_, 0, 16)])) == 16


def test_rows_of_read_only_blocks_are_planned_as_all_others_are() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = AddressRange.sparse(SHAPE.geometry())
    range_.map(heap, 0, 0, 2, writable=False)
    assert len(RowTable([(range_, 0, 32)])) == 32
    with pytest.raises(IndexError, match=r"does not lie inside \[0, 32\)"):
        RowTable([(range_, 32, 1)])


@pytest.mark.parametrize("wrong", [[(None, 0, 1)], [(1, 0, 1)], [()], None, 3])
def test_what_is_no_segment_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        RowTable(wrong)  # type: ignore[arg-type]
