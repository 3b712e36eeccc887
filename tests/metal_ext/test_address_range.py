import random
import sys

import numpy as np
import pytest

from metal_ext import AddressRange, Geometry, Heap, Mapper, RowTable
from tests.metal_ext.programs import output_of, run_program
from tests.metal_ext.shapes import PAGE, Shape, bytes_at, unmapped

SHAPE = Shape()
SEGMENTATION_FAULT = -11
TOUCH = """
    import ctypes
    from metal_ext import AddressRange, Heap, Mapper
    from tests.metal_ext.shapes import Shape, unmapped
    shape = Shape()
    def read(range_, region, block):
        return ctypes.c_uint8.from_address(range_.base_address + shape.offset(region, block)).value
"""


def test_the_rows_of_a_block_fill_whole_pages() -> None:
    with pytest.raises(ValueError, match="16 rows of 80 bytes"):
        SHAPE.geometry(rows=(PAGE // 16, 80))


def test_a_region_is_contiguous_whatever_blocks_stand_behind_it() -> None:
    heaps = [Heap.shared(SHAPE.geometry()) for _ in range(2)]
    range_ = AddressRange.sparse(SHAPE.geometry())
    places = [(h, b) for h in heaps for b in range(8)]
    random.Random(1).shuffle(places)
    for block, (heap, heap_block) in enumerate(places[:8]):
        range_.map(heap, heap_block, block, 1, writable=True)
    for region in range(3):
        size = SHAPE.block_bytes(region) * 8
        whole = bytes_at(range_.base_address + SHAPE.offset(region, 0), size)
        whole[:] = np.random.default_rng(region).integers(0, 256, size, dtype=np.uint8)
    for region in range(3):
        size = SHAPE.block_bytes(region) * 8
        want = np.random.default_rng(region).integers(0, 256, size, dtype=np.uint8)
        got = np.concatenate([SHAPE.block(range_, region, block) for block in range(8)])
        assert np.array_equal(got, want)


@pytest.mark.parametrize(("block", "count"), [(2, 1), (1, 2), (2, 3), (0, 8)])
def test_a_block_is_not_mapped_twice(block: int, count: int) -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = AddressRange.sparse(SHAPE.geometry())
    range_.map(heap, 0, 2, 1, writable=True)
    SHAPE.block(range_, 1, 2)[:] = 3
    with pytest.raises(RuntimeError, match="block 2 is mapped already"):
        range_.map(heap, 0, block, count, writable=True)
    assert range_.mapped_tokens == 0
    assert (SHAPE.block(range_, 1, 2) == 3).all()


def test_a_huge_range_costs_addresses_only() -> None:
    shape = Shape(blocks_per_range=2**24)
    range_ = AddressRange.sparse(shape.geometry())
    heap = Heap.shared(shape.geometry())
    range_.map(heap, 0, 2**24 - 8, 8, writable=True)
    shape.block(range_, 2, 2**24 - 1)[-1] = 1
    assert heap.committed_bytes == PAGE


def test_blocks_of_a_ring_lie_in_a_row_wherever_they_begin_and_take_no_other_blocks_place() -> None:
    sizes = {"page_bytes": PAGE, "tokens_per_block": 16, "blocks_per_heap": 8}
    ring = Geometry(**sizes, blocks_per_range=99, region_row_bytes=[PAGE // 16] * 2, ring_blocks=3)
    heap, range_, mapper = Heap.shared(ring), AddressRange.sparse(ring), Mapper()

    def page(region: int, slot: int) -> np.ndarray:
        return bytes_at(range_.base_address + (6 * region + slot) * PAGE, PAGE)

    # After block 19 comes block 50, as where a sequence goes on behind another one's blocks.
    blocks = [*range(20), *range(50, 60)]
    for number, block in enumerate(blocks):
        if number >= 3:
            with pytest.raises(RuntimeError, match="1 blocks do not fit beside 3 in a ring of 3"):
                range_.map(heap, number % 8, block, 1, writable=True)
            unmapped(mapper, range_, blocks[number - 3], 1)
        range_.map(heap, number % 8, block, 1, writable=True)
        for region in range(2):
            page(region, number % 3)[:] = number
            first = max(0, number - 2)
            row = [page(region, first % 3 + i)[-1] for i in range(number + 1 - first)]
            assert row == list(range(first, number + 1))
    unmapped(mapper, range_, 57, 1)
    with pytest.raises(RuntimeError, match="block 57 lies before a mapped block of a ring"):
        range_.map(heap, 0, 57, 1, writable=True)


@pytest.mark.parametrize(
    "how",
    [
        "range_ = AddressRange.sparse(shape.geometry()); read(range_, 0, 0)",
        "range_ = shape.mapped(2); read(range_, 0, 1); read(range_, 0, 2)",
        "range_ = shape.mapped(2); read(range_, 2, 2)",
        "range_ = shape.mapped(8); unmapped(Mapper(), range_, 3, 1); read(range_, 1, 3)",
        "range_ = shape.mapped(1); base = range_.base_address; del range_;"
        "print(ctypes.c_uint8.from_address(base).value)",
    ],
    ids=["nothing mapped", "behind the last block", "the last region", "unmapped", "range dropped"],
)
def test_reading_a_block_without_memory_is_a_segmentation_fault(how: str) -> None:
    done = run_program(TOUCH + "    print('started', flush=True)\n    " + how)
    assert done.stdout == "started\n", done.stderr
    assert done.returncode == SEGMENTATION_FAULT


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_stray_store_to_a_read_only_block_is_a_segmentation_fault(block: int) -> None:
    done = run_program(f"""
        import ctypes
        from metal_ext import AddressRange, Heap
        from tests.metal_ext.shapes import Shape
        shape = Shape()
        heap = Heap.shared(shape.geometry())
        owner, sharer = shape.mapped(2, heap), AddressRange.sparse(shape.geometry())
        sharer.map(heap, 0, 0, 2, writable=False)
        sharer.map(heap, 2, 2, 1, writable=True)
        shape.block(owner, 1, {block % 2})[0] = 5
        byte = ctypes.c_uint8.from_address(sharer.base_address + shape.offset(1, {block}))
        print(byte.value, flush=True)
        byte.value = 6
        print("written")
    """)
    if block < 2:
        assert (done.stdout, done.returncode) == ("5\n", SEGMENTATION_FAULT), done.stderr
    else:
        assert (done.stdout, done.returncode) == ("0\nwritten\n", 0), done.stderr


# Every second block of a range that takes heap blocks backwards is a mapping that joins on to no
# other, so that the system's limit is met soon. Then mappings of another kind are given up one by
# one, so that the map is refused at each of its regions in turn, until it goes through.
EXHAUST = """
    import mmap
    from metal_ext import AddressRange, Heap, Mapper
    from tests.metal_ext.shapes import Shape
    shape = Shape(blocks_per_heap=4096, blocks_per_range=4096, rows=(256,) * 6)
    heap = Heap.shared(shape.geometry())
    spare = [mmap.mmap(-1, 4096) for _ in range(20)]

    def inside(range_):
        low = range_.base_address
        high = low + shape.offset(5, 4096)
        found = []
        for line in open("/proc/self/maps"):
            place, rest = line.split(" ", 1)
            first, last = (int(x, 16) for x in place.split("-"))
            if last > low and first < high:
                found.append((max(first, low), min(last, high), rest))
        return found

    mapper = Mapper()

    def refused_ahead(range_, block):
        ticket = mapper.map(range_, heap, 4095 - block, block, 1, writable=True)
        assert mapper.wait(ticket, 30.0)
        assert mapper.failure == "", mapper.failure
        return mapper.refused(ticket)

    def refused(range_, block):
        try:
            range_.map(heap, 4095 - block, block, 1, writable=True)
        except OSError as error:
            assert error.errno == 12, error
            assert "mmap of 4096 bytes" in str(error), error
            return True
        return False

    ranges, block = [], 4096
    while block == 4096 and len(ranges) < 40:
        ranges.append(AddressRange.sparse(shape.geometry()))
        block = next((b for b in range(0, 4096, 2) if refused(ranges[-1], b)), 4096)
    before = inside(ranges[-1])
    mapped = sum(end - first for first, end, rest in before if "quire-heap" in rest)
    assert mapped == block // 2 * 6 * 4096, (mapped, block)
    times = 1
    while REFUSED(ranges[-1], block):
        assert inside(ranges[-1]) == before
        spare.pop().close()
        times += 1
    print(times > 8, len(inside(ranges[-1])) > len(before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits mappings")
@pytest.mark.parametrize("on", ["refused", "refused_ahead"], ids=["this thread", "the mapper's"])
def test_mappings_run_out_without_a_trace(on: str) -> None:
    # Where no mapping is left, memory for the test itself must be there beforehand: glibc's heap is
    # made large at once, and serves everything.
    ballast = {"MALLOC_TOP_PAD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
    ballast |= {"MALLOC_ARENA_MAX": "1", "PYTHONMALLOC": "malloc"}
    assert output_of(EXHAUST.replace("REFUSED", on), **ballast) == "True True"


def test_row_tables_keep_their_ranges_alive() -> None:
    range_ = SHAPE.mapped(2)
    base = range_.base_address
    rows = RowTable([(range_, 0, 32)])
    bytes_at(base, 8)[:] = 4
    del range_
    assert (bytes_at(base, 8) == 4).all()
    assert len(rows) == 32


def test_a_table_has_as_many_rows_as_its_segments() -> None:
    one, other = SHAPE.mapped(2), SHAPE.mapped(8)
    assert len(RowTable([(one, 31, 1), (other, 0, 128), (one, 3, 7)])) == 136
    with pytest.raises(IndexError, match=r"does not lie inside \[0, 32\)"):
        RowTable([(other, 0, 5), (one, 31, 2)])


@pytest.mark.parametrize("wrong", [[(None, 0, 1)], [(1, 0, 1)], [()], None, 3])
def test_what_is_no_segment_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        RowTable(wrong)  # type: ignore[arg-type]
