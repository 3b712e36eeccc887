import sys

import pytest

from metal_ext import AddressRange, Heap, Mapper
from tests.metal_ext.programs import output_of
from tests.metal_ext.shapes import PAGE, Shape, released, unmapped

SHAPE = Shape()
WHOLE = Shape(blocks_per_heap=1, blocks_per_range=1)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts pages of a memfd")


def test_a_new_heap_is_charged_nothing() -> None:
    heap = Heap.shared(SHAPE.geometry())
    assert heap.committed_bytes == 0
    SHAPE.mapped(8, heap)
    assert heap.committed_bytes == 0, "mapping is not writing"


def test_committed_bytes_follow_writes_page_by_page() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(8, heap)
    pages = 0
    for block in (5, 0, 7):
        for region in range(3):
            view = SHAPE.block(range_, region, block)
            for start in range(0, len(view), PAGE):
                view[start + 17] = 1
                pages += 1
                assert heap.committed_bytes == pages * PAGE
    SHAPE.block(range_, 1, 5)[:] = 2
    assert heap.committed_bytes == pages * PAGE


def test_committed_bytes_survive_unmapping_and_go_to_zero_after_release() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(8, heap)
    mapper = Mapper()
    for block in range(8):
        for region in range(3):
            SHAPE.block(range_, region, block)[:] = 7
    everything = SHAPE.geometry().heap_bytes
    assert heap.committed_bytes == everything
    unmapped(mapper, range_, 0, 8)
    assert heap.committed_bytes == everything
    released(mapper, heap, 0, 8)
    assert heap.committed_bytes == 0


def test_releasing_single_blocks_frees_exactly_those() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(8, heap)
    mapper = Mapper()
    for block in range(8):
        for region in range(3):
            SHAPE.block(range_, region, block)[:] = 16 * region + block + 1
    unmapped(mapper, range_, 0, 8)
    held = SHAPE.geometry().heap_bytes
    gone = set()
    for first, count in ((3, 1), (0, 1), (5, 3)):
        released(mapper, heap, first, count)
        gone |= set(range(first, first + count))
        held -= count * SHAPE.geometry().block_bytes
        assert heap.committed_bytes == held
    range_.map(heap, 0, 0, 8, writable=True)
    for block in range(8):
        for region in range(3):
            want = 0 if block in gone else 16 * region + block + 1
            assert (SHAPE.block(range_, region, block) == want).all()


def test_a_block_may_be_released_twice_and_used_again() -> None:
    heap = Heap.shared(SHAPE.geometry())
    mapper = Mapper()
    range_ = AddressRange.sparse(SHAPE.geometry())
    for value in (1, 2):
        released(mapper, heap, 2, 1)
        released(mapper, heap, 2, 1)
        range_.map(heap, 2, 0, 1, writable=True)
        view = SHAPE.block(range_, 1, 0)
        assert not view.any()
        view[:] = value
        unmapped(mapper, range_, 0, 1)


def test_memory_outlives_the_handle_of_its_heap() -> None:
    range_ = SHAPE.mapped(8)  # the only handle of the heap is gone
    view = SHAPE.block(range_, 2, 3)
    view[:] = 9
    other = SHAPE.mapped(8)
    assert (view == 9).all()
    assert not SHAPE.block(other, 2, 3).any()


def test_a_dense_heap_is_charged_in_full_when_it_is_mapped_until_it_is_released() -> None:
    geometry = WHOLE.geometry()
    heap = Heap.dense(geometry)
    range_ = AddressRange.dense(geometry)
    mapper = Mapper()
    assert (heap.committed_bytes, range_.base_address, range_.mapped_tokens) == (0, 0, 0)
    for _ in range(2):
        range_.map(heap, 0, 0, 1, writable=True)
        assert heap.committed_bytes == geometry.heap_bytes
        assert range_.mapped_tokens == 16
        view = WHOLE.block(range_, 1, 0)
        assert not view.any()
        view[:] = 5
        unmapped(mapper, range_, 0, 1)
        assert (range_.base_address, range_.mapped_tokens) == (0, 0)
        assert heap.committed_bytes == geometry.heap_bytes
        released(mapper, heap, 0, 1)
        assert heap.committed_bytes == 0


def test_heaps_are_refused_with_their_size_where_the_system_has_no_file_left() -> None:
    done = output_of(f"""
        import resource
        from metal_ext import Heap
        from tests.metal_ext.shapes import Shape
        geometry = Shape().geometry()
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        heaps = []
        try:
            while len(heaps) < 30:
                heaps.append(Heap.shared(geometry))
        except OSError as error:
            assert error.errno == 24, error
            print(str(error).count("{SHAPE.geometry().heap_bytes}"), len(heaps) < 20)
        heaps.clear()
        print(Heap.shared(geometry).committed_bytes)
    """)
    assert done == "1 True\n0"


def test_a_heap_too_long_for_a_file_is_refused_and_its_file_is_closed() -> None:
    done = output_of("""
        import os, resource
        from metal_ext import Heap
        from tests.metal_ext.shapes import Shape
        geometry = Shape().geometry()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            try:
                Heap.shared(geometry)
            except OSError as error:
                print(error.errno, "ftruncate of" in str(error))
        print(len(os.listdir("/proc/self/fd")) - before)
    """)
    assert done.split("\n") == ["27 True"] * 3 + ["0"]
