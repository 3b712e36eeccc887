import threading
import time

import pytest

from metal_ext import AddressRange, Heap, Mapper
from tests.metal_ext.programs import output_of
from tests.metal_ext.shapes import WAIT_S, Shape, eventually, unmapped

SHAPE = Shape()
NEVER_GIVEN = 10**9


def test_tickets_rise_by_one_and_complete_in_order() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    assert mapper.completed == 0
    assert mapper.failure == ""
    for ticket in range(1, 201):
        before = mapper.completed
        assert mapper.release(heap, 0, 1) == ticket
        assert before <= mapper.completed <= ticket
    assert mapper.wait(100, WAIT_S)
    assert mapper.completed >= 100
    assert mapper.wait(200, WAIT_S)
    assert mapper.completed == 200


def test_the_effect_is_seen_when_the_ticket_is_done() -> None:
    mapper = Mapper()
    range_ = SHAPE.mapped(8)
    for block in range(7, -1, -1):
        assert mapper.wait(mapper.unmap(range_, block, 1), WAIT_S)
        assert range_.mapped_tokens == 16 * block


def test_a_wait_ends_when_its_time_has_passed() -> None:
    mapper = Mapper()
    start = time.monotonic()
    assert mapper.wait(NEVER_GIVEN, 0.05) is False
    assert 0.05 <= time.monotonic() - start < 10
    assert mapper.wait(1, 0.0) is False


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


def test_the_first_failure_is_kept_and_the_rest_still_runs() -> None:
    mapper = Mapper()
    range_ = SHAPE.mapped(3)
    mapper.unmap(range_, 5, 1)
    mapper.unmap(range_, 6, 1)
    last = mapper.unmap(range_, 2, 1)
    assert mapper.wait(last, WAIT_S)
    assert mapper.failure == "block 5 is not mapped"
    assert range_.mapped_tokens == 32


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


def test_threads_share_a_mapper() -> None:
    mapper = Mapper()
    tickets: list[list[int]] = [[], [], []]

    def work(number: int) -> None:
        range_ = AddressRange.sparse(SHAPE.geometry())
        heap = Heap.shared(SHAPE.geometry())
        for i in range(100):
            range_.map(heap, i % 8, 0, 1)
            tickets[number].append(mapper.unmap(range_, 0, 1))
            mapper.wait(tickets[number][-1], WAIT_S)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mapper.failure == ""
    assert sorted(ticket for mine in tickets for ticket in mine) == list(range(1, 301))
    assert all(mine == sorted(mine) for mine in tickets)


def test_one_thread_maps_while_the_mapper_takes_other_blocks_of_the_range() -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(8, heap)
    for i in range(200):
        ticket = mapper.unmap(range_, 4 + i % 4, 1)
        view = SHAPE.block(range_, 0, i % 4)
        view[:] = i % 256
        assert mapper.wait(ticket, WAIT_S)
        range_.map(heap, 4 + i % 4, 4 + i % 4, 1)
        assert (view == i % 256).all()
    assert range_.mapped_tokens == 128


def test_a_mapper_that_goes_finishes_what_was_queued() -> None:
    heap = Heap.shared(SHAPE.geometry())
    range_ = SHAPE.mapped(8, heap)
    for block in range(8):
        SHAPE.block(range_, 1, block)[:] = 1
    mapper = Mapper()
    for block in range(8):
        mapper.unmap(range_, block, 1)
    mapper.release(heap, 0, 8)
    del mapper
    assert eventually(lambda: heap.committed_bytes == 0)
    assert range_.mapped_tokens == 0


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


@pytest.mark.parametrize("count", [1, 8])
def test_a_range_can_be_filled_again_after_it_was_unmapped(count: int) -> None:
    mapper = Mapper()
    heap = Heap.shared(SHAPE.geometry())
    range_ = AddressRange.sparse(SHAPE.geometry())
    for round_ in range(20):
        range_.map(heap, 0, 0, count)
        view = SHAPE.block(range_, 2, count - 1)
        assert int(view[0]) == round_, "the heap keeps what was written"
        view[0] = round_ + 1
        unmapped(mapper, range_, 0, count)
