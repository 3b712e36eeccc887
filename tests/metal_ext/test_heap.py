import sys

import pytest

from metal_ext import Heap
from tests.metal_ext.programs import output_of
from tests.metal_ext.shapes import PAGE, Shape

SHAPE = Shape()
WHOLE = Shape(blocks_per_heap=1, blocks_per_range=1)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts pages of a memfd")


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


def test_memory_outlives_the_handle_of_its_heap() -> None:
    range_ = SHAPE.mapped(8)  # the only handle of the heap is gone
    view = SHAPE.block(range_, 2, 3)
    view[:] = 9
    other = SHAPE.mapped(8)
    assert (view == 9).all()
    assert not SHAPE.block(other, 2, 3).any()


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
            print(str(error).count("{8 * sum(map(SHAPE.block_bytes, range(3)))}"), len(heaps) < 20)
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
