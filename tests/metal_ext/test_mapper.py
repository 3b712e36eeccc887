import resource
import sys
import threading
import time

import mlx.core as mx
import pytest

from metal_ext import AddressRange, CpuWorkers, Heap, Layer, Mapper, RowTable, append
from tests.metal_ext.programs import output_of
from tests.metal_ext.shapes import PAGE, WAIT_S, Shape

SHAPE = Shape()


def test_a_wait_does_not_hold_the_interpreter() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(mapper.wait(1, WAIT_S)))
    waiting.start()
    time.sleep(0.02)
    assert seen == []
    mapper.release(heap, 0, 1)  # could not be called while the lock is held
    waiting.join()
    assert seen == [True]


def test_what_is_mapped_ahead_can_be_used_when_its_ticket_is_done() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(1, heap)
    first = mapper.map(range_, heap, 4, 1, 2, writable=True)
    second = mapper.map(range_, heap, 1, 3, 1, writable=True)
    assert mapper.wait(second, WAIT_S)
    assert (mapper.refused(first), mapper.refused(second), mapper.failure) == (False, False, "")
    assert range_.mapped_tokens == 64
    for region in range(3):
        SHAPE.block(range_, region, 2)[:] = 7
    other = SHAPE.mapped(8, heap)
    for region in range(3):
        assert (SHAPE.block(other, region, 5) == 7).all()
        assert not SHAPE.block(other, region, 4).any()
    assert len(RowTable([(range_, 63, 1)])) == 1


def test_a_block_can_be_mapped_read_only_by_the_thread() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    owner, sharer = AddressRange.sparse(SHAPE.geometry()), AddressRange.sparse(SHAPE.geometry())
    mapper.map(owner, heap, 2, 0, 1, writable=True)
    mapper.wait(mapper.map(sharer, heap, 2, 0, 1, writable=False), WAIT_S)
    SHAPE.block(owner, 0, 0)[:] = 9
    assert (SHAPE.block(sharer, 0, 0) == 9).all()
    rows, keys = RowTable([(sharer, 3, 1)]), mx.zeros((1, PAGE // 16 // 4 // 32, 32))
    with pytest.raises(IndexError, match="block 0 is read-only"):
        append(mx.zeros((1,)), keys, keys, rows, Layer(0, 2, mx.float32), CpuWorkers(1))


def test_the_first_write_to_what_was_mapped_ahead_takes_no_page_fault() -> None:
    if sys.platform != "linux":  # as a mark would, but that mypy understands it
        pytest.skip("only Linux commits memory ahead")
    shape = Shape(tokens_per_block=512)  # 128 pages a block
    heap = Heap.shared(shape.geometry())
    range_ = AddressRange.sparse(shape.geometry())
    mapper = Mapper()
    faults = {}
    for block, ahead in enumerate([False, True]):
        if ahead:
            assert mapper.wait(mapper.map(range_, heap, block, block, 1, writable=True), WAIT_S)
            assert heap.committed_bytes == 2 * sum(map(shape.block_bytes, range(3)))
        else:
            range_.map(heap, block, block, 1, writable=True)
            assert heap.committed_bytes == 0
        views = [shape.block(range_, region, block) for region in range(3)]
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for view in views:
            view[:] = 1
        faults[ahead] = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults[True] < 4 < faults[False]


def test_a_heap_of_another_geometry_is_refused_before_it_is_queued() -> None:
    mapper = Mapper()
    other = Heap.shared(SHAPE.geometry(blocks_per_heap=9))
    with pytest.raises(ValueError, match="the heap and the range have different geometries"):
        mapper.map(AddressRange.sparse(SHAPE.geometry()), other, 0, 0, 1, writable=True)
    assert mapper.unmap(SHAPE.mapped(1), 0, 1) == 1, "nothing was queued before"


def test_a_dense_heap_that_gets_no_memory_ahead_is_refused() -> None:
    assert (
        output_of("""
        import resource
        from metal_ext import AddressRange, Heap, Mapper
        from tests.metal_ext.shapes import Shape
        geometry = Shape(2**26, 2**16, 1, 1, (1024,)).geometry()
        heap, range_, mapper = Heap.dense(geometry), AddressRange.dense(geometry), Mapper()
        mapper.wait(mapper.release(heap, 0, 1), 30.0)  # its thread runs
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (2**20, limit[1]))
        for _ in range(2):
            ticket = mapper.map(range_, heap, 0, 0, 1, writable=True)
            mapper.wait(ticket, 30.0)
            resource.setrlimit(resource.RLIMIT_DATA, limit)
            print(mapper.refused(ticket), mapper.refused(ticket), range_.mapped_tokens)
        print(repr(mapper.failure))
    """)
        == "True False 0\nFalse False 65536\n''"
    )


def test_handles_may_be_dropped_while_operations_are_queued() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    for _ in range(100):
        range_ = SHAPE.mapped(8, heap)
        SHAPE.block(range_, 0, 0)[:] = 1
        mapper.unmap(range_, 0, 8)
        del range_
    last = mapper.release(heap, 0, 8)
    assert mapper.wait(last, WAIT_S)
    assert mapper.failure == ""
    assert heap.committed_bytes == 0


def test_a_program_may_end_with_operations_queued() -> None:
    assert (
        output_of("""
        from metal_ext import Heap, Mapper
        from tests.metal_ext.shapes import Shape
        mapper, range_ = Mapper(), Shape().mapped(8)
        for block in range(8):
            mapper.unmap(range_, block, 1)
        print("ended")
    """)
        == "ended"
    )
