import random
import sys

import numpy as np
import pytest

from metal_ext import AddressRange, Heap, Mapper, RowTable
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


def test_two_ranges_that_map_one_heap_block_see_one_anothers_bytes() -> None:
    heap = Heap.shared(SHAPE.geometry())
    one, other = (AddressRange.sparse(SHAPE.geometry()) for _ in range(2))
    one.map(heap, 3, 0, 1, writable=True)
    other.map(heap, 2, 4, 3, writable=True)  # heap block 3 stands behind its block 5
    for region in range(3):
        SHAPE.block(one, region, 0)[:] = region + 1
        assert (SHAPE.block(other, region, 5) == region + 1).all()
        SHAPE.block(other, region, 5)[-1] = 99
        assert SHAPE.block(one, region, 0)[-1] == 99
        assert not SHAPE.block(other, region, 4).any()
        assert not SHAPE.block(other, region, 6).any()


def test_what_its_owner_writes_is_read_in_every_range_that_shares_the_block() -> None:
    heap = Heap.shared(SHAPE.geometry())
    owner = SHAPE.mapped(2, heap)
    sharers = [AddressRange.sparse(SHAPE.geometry()) for _ in range(20)]
    for number, sharer in enumerate(sharers):
        sharer.map(heap, 1, 0, 1, writable=False)
        sharer.map(heap, 2 + number % 6, 1, 1, writable=True)
        assert sharer.mapped_tokens == 32
    for region in range(3):
        SHAPE.block(owner, region, 1)[:] = region + 1
    for sharer in sharers:
        for region in range(3):
            assert (SHAPE.block(sharer, region, 0) == region + 1).all()


def test_one_range_may_hold_a_heap_block_twice() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = AddressRange.sparse(SHAPE.geometry())
    range_.map(heap, 1, 0, 1, writable=True)
    range_.map(heap, 1, 7, 1, writable=True)
    SHAPE.block(range_, 1, 7)[5] = 5
    assert SHAPE.block(range_, 1, 0)[5] == 5


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


def test_mapped_tokens_counts_leading_blocks_only() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = AddressRange.sparse(SHAPE.geometry())
    mapper = Mapper()
    assert range_.mapped_tokens == 0
    range_.map(heap, 0, 2, 2, writable=True)
    assert range_.mapped_tokens == 0
    range_.map(heap, 2, 0, 1, writable=True)
    assert range_.mapped_tokens == 16
    range_.map(heap, 3, 1, 1, writable=True)
    assert range_.mapped_tokens == 64
    unmapped(mapper, range_, 1, 1)
    assert range_.mapped_tokens == 16
    unmapped(mapper, range_, 2, 2)
    assert range_.mapped_tokens == 16
    unmapped(mapper, range_, 0, 1)
    assert range_.mapped_tokens == 0


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


@pytest.mark.parametrize(("block", "count"), [(1, 1), (0, 2), (1, 7)])
def test_a_block_is_not_unmapped_twice(block: int, count: int) -> None:
    range_ = SHAPE.mapped(1)
    mapper = Mapper()
    SHAPE.block(range_, 0, 0)[:] = 3
    ticket = mapper.unmap(range_, block, count)
    assert mapper.wait(ticket, 30.0)
    assert mapper.failure == "block 1 is not mapped"
    assert range_.mapped_tokens == 16
    assert (SHAPE.block(range_, 0, 0) == 3).all()


def test_heaps_of_other_geometries_are_refused() -> None:
    range_ = AddressRange.sparse(SHAPE.geometry())
    for changes in (
        {"blocks_per_range": 9},
        {"blocks_per_heap": 9},
        {"rows": (*SHAPE.rows[:2], 2 * SHAPE.rows[2])},
        {"tokens_per_block": 32},
    ):
        with pytest.raises(ValueError, match="the heap and the range have different geometries"):
            range_.map(Heap.shared(SHAPE.geometry(**changes)), 0, 0, 1, writable=True)
    range_.map(Heap.shared(Shape().geometry()), 0, 0, 1, writable=True)  # an equal one is no other


def test_heaps_and_ranges_of_different_kinds_do_not_mix() -> None:
    whole = SHAPE.geometry(blocks_per_heap=1, blocks_per_range=1)
    with pytest.raises(ValueError, match="a sparse range takes blocks of shared heaps only"):
        AddressRange.sparse(whole).map(Heap.dense(whole), 0, 0, 1, writable=True)
    dense = AddressRange.dense(whole)
    with pytest.raises(ValueError, match="a dense range takes a dense heap only"):
        dense.map(Heap.shared(whole), 0, 0, 1, writable=True)
    assert dense.mapped_tokens == 0
    with pytest.raises(ValueError, match="a dense range shares nothing"):
        dense.map(Heap.dense(whole), 0, 0, 1, writable=False)
    assert dense.mapped_tokens == 0
    dense.map(Heap.dense(whole), 0, 0, 1, writable=True)
    with pytest.raises(ValueError, match="a dense range is one block, and so is its heap"):
        AddressRange.dense(SHAPE.geometry())


def test_below_a_range_its_size_can_be_read() -> None:
    whole = SHAPE.geometry(blocks_per_heap=1, blocks_per_range=1)
    dense = AddressRange.dense(whole)
    dense.map(Heap.dense(whole), 0, 0, 1, writable=True)
    for range_, geometry in ((SHAPE.mapped(1), SHAPE.geometry()), (dense, whole)):
        size = bytes_at(range_.base_address - 8, 8).view(np.uint64)
        assert int(size[0]) == geometry.range_bytes
        assert range_.base_address % PAGE == 0


def test_a_huge_range_costs_addresses_only() -> None:
    shape = Shape(blocks_per_range=2**24)
    range_ = AddressRange.sparse(shape.geometry())
    heap = Heap.shared(shape.geometry())
    range_.map(heap, 0, 2**24 - 8, 8, writable=True)
    shape.block(range_, 2, 2**24 - 1)[-1] = 1
    assert heap.committed_bytes == PAGE


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


def test_a_refused_reservation_is_an_error_that_names_its_size() -> None:
    assert (
        output_of("""
        import resource
        from metal_ext import AddressRange
        from tests.metal_ext.shapes import Shape
        geometry = Shape(blocks_per_range=2**22).geometry()
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        try:
            AddressRange.sparse(geometry)
        except OSError as error:
            print(error.errno, str(geometry.range_bytes) in str(error))
    """)
        == "12 True"
    )


def test_a_dense_range_that_gets_no_memory_is_as_it_was() -> None:
    assert (
        output_of("""
        import resource
        from metal_ext import AddressRange, Heap
        from tests.metal_ext.shapes import Shape
        geometry = Shape(2**26, 2**16, 1, 1, (1024,)).geometry()
        heap, range_ = Heap.dense(geometry), AddressRange.dense(geometry)
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (2**20, limit[1]))
        try:
            range_.map(heap, 0, 0, 1, writable=True)
        except OSError as error:
            print(error.errno, range_.base_address, range_.mapped_tokens, heap.committed_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, limit)
        range_.map(heap, 0, 0, 1, writable=True)
        print(range_.mapped_tokens)
    """)
        == "12 0 0 0\n65536"
    )


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
        high = low + shape.geometry().range_bytes
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
