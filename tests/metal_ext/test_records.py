"""Blocks and state slots as records of a file."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from metal_ext import AddressRange, Geometry, Heap, Mapper, StateMemory
from tests.metal_ext.shapes import PAGE, Shape, bytes_at, unmapped

OFFSET = 3 * PAGE + 5
BYTES = np.random.default_rng(1)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def crc32c(data: bytes) -> int:
    """By the definition, bit by bit (RFC 3720)."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    total = 0xFFFFFFFF
    for bit in bits.tolist():
        total = (total >> 1) ^ (0x82F63B78 if (total ^ bit) & 1 else 0)
    return total ^ 0xFFFFFFFF


def fill(shape: Shape, range_: AddressRange, block: int) -> bytes:
    """Write random bytes to all regions of a block and return them in order."""
    parts = [shape.block(range_, region, block) for region in range(len(shape.rows))]
    for part in parts:
        part[:] = BYTES.integers(0, 256, part.size, dtype=np.uint8)
    return b"".join(part.tobytes() for part in parts)


def contents(shape: Shape, range_: AddressRange, block: int) -> bytes:
    regions = range(len(shape.rows))
    return b"".join(shape.block(range_, region, block).tobytes() for region in regions)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(rows=(PAGE // 16,)),
        Shape(page_bytes=2 * PAGE, rows=(PAGE // 8, PAGE // 4, PAGE // 8, PAGE // 8)),
        Shape(tokens_per_block=1, rows=(PAGE,) * 2500, blocks_per_heap=3, blocks_per_range=3),
        Shape(tokens_per_block=5 * 2**20 // PAGE, rows=(PAGE,) * 4, blocks_per_heap=3),
    ],
    ids=["three regions", "one region", "large pages", "more pieces than a call takes", "20 MiB"],
)
def test_a_block_comes_back_in_another_place_and_changes_no_other(fd: int, shape: Shape) -> None:
    source = shape.mapped(3)
    written = [fill(shape, source, block) for block in range(3)]
    total = source.write_block(1, fd, OFFSET)
    assert os.fstat(fd).st_size == OFFSET + len(written[1])
    assert os.pread(fd, len(written[1]), OFFSET) == written[1]
    target = shape.mapped(3)
    others = [fill(shape, target, block) for block in range(3)]
    assert target.read_block(2, fd, OFFSET) == total
    assert contents(shape, target, 2) == written[1]
    assert [contents(shape, target, block) for block in range(2)] == others[:2]
    assert [contents(shape, source, block) for block in range(3)] == written


def test_the_sum_is_crc32c_of_the_bytes_in_order(fd: int) -> None:
    shape = Shape()
    range_ = shape.mapped(2)
    written = fill(shape, range_, 1)
    assert range_.write_block(1, fd, 0) == crc32c(written)
    os.pwrite(fd, bytes([written[700] ^ 1]), 700)
    changed = written[:700] + bytes([written[700] ^ 1]) + written[701:]
    assert range_.read_block(1, fd, 0) == crc32c(changed)


def test_blocks_of_a_ring_are_moved_at_the_places_where_they_lie(fd: int) -> None:
    sizes = {"page_bytes": PAGE, "tokens_per_block": 16, "blocks_per_heap": 8}
    ring = Geometry(**sizes, blocks_per_range=99, region_row_bytes=[PAGE // 16] * 2, ring_blocks=3)
    heap, range_, mapper = Heap.shared(ring), AddressRange.sparse(ring), Mapper()

    def page(region: int, slot: int) -> np.ndarray:
        return bytes_at(range_.base_address + (6 * region + slot) * PAGE, PAGE)

    for number in range(7):
        if number >= 3:
            unmapped(mapper, range_, number - 3, 1)
        range_.map(heap, number, number, 1, writable=True)
        for region in range(2):
            page(region, number % 3)[:] = 10 * number + region
        range_.write_block(number, fd, number * 2 * PAGE)
    assert os.pread(fd, 2 * PAGE, 6 * 2 * PAGE) == bytes([60]) * PAGE + bytes([61]) * PAGE
    range_.read_block(5, fd, 0)
    assert [(page(0, slot)[0], page(1, slot)[-1]) for slot in range(6)] == [
        (60, 61), (40, 41), (0, 1), (60, 61), (40, 41), (0, 1),
    ]  # fmt: skip


def test_a_block_of_a_dense_range_is_a_record_too(fd: int) -> None:
    shape = Shape(blocks_per_heap=1, blocks_per_range=1)
    range_ = AddressRange.dense(shape.geometry())
    range_.map(Heap.dense(shape.geometry()), 0, 0, 1, writable=True)
    written = fill(shape, range_, 0)
    total = range_.write_block(0, fd, 0)
    fill(shape, range_, 0)
    assert range_.read_block(0, fd, 0) == total
    assert contents(shape, range_, 0) == written


def test_a_slot_comes_back_and_its_neighbours_stay(fd: int) -> None:
    memory = StateMemory(3 * 1040)
    slots = bytes_at(memory.address, 3 * 1040).reshape(3, 1040)
    slots[:] = BYTES.integers(0, 256, slots.shape, dtype=np.uint8)
    written = slots.copy()
    total = memory.write_record(1040, 1040, fd, OFFSET)
    assert total == crc32c(written[1].tobytes())
    slots[1] = 0
    assert memory.read_record(2080, 1040, fd, OFFSET) == total
    assert slots.tobytes() == written[0].tobytes() + bytes(1040) + written[1].tobytes()
    with pytest.raises(IndexError, match="bytes of the memory"):
        memory.write_record(memory.bytes - 8, 16, fd, 0)


@pytest.mark.parametrize("missing", [1, PAGE, 4 * PAGE])
def test_a_file_that_ends_inside_a_record_is_an_error(fd: int, missing: int) -> None:
    range_, memory = Shape().mapped(1), StateMemory(4 * PAGE)
    os.ftruncate(fd, OFFSET + 4 * PAGE - missing)
    reads: list[Callable[[], int]] = [
        lambda: range_.read_block(0, fd, OFFSET),
        lambda: memory.read_record(0, 4 * PAGE, fd, OFFSET),
    ]
    for read in reads:
        with pytest.raises(OSError, match=r"preadv at .*, where the file ends") as caught:
            read()
        assert caught.value.errno == errno.EIO


def test_what_the_system_refuses_is_named(fd: int, tmp_path: Path) -> None:
    range_ = Shape().mapped(1)
    read_only = os.open(tmp_path / "records", os.O_RDONLY)
    os.close(closed := os.dup(fd))
    for bad, call in (
        (closed, range_.read_block),
        (closed, range_.write_block),
        (read_only, range_.write_block),
    ):
        with pytest.raises(OSError, match="at 0") as caught:
            call(0, bad, 0)
        assert caught.value.errno == errno.EBADF
    os.close(read_only)
    with open("/dev/full", "wb") as full, pytest.raises(OSError, match="pwritev") as caught:
        range_.write_block(0, full.fileno(), 0)
    assert caught.value.errno == errno.ENOSPC


def test_what_is_not_mapped_or_is_shared_is_refused_before_a_byte_moves(fd: int) -> None:
    shape = Shape()
    heap = Heap.shared(shape.geometry())
    owner = shape.mapped(1, heap)
    sharer = AddressRange.sparse(shape.geometry())
    sharer.map(heap, 0, 0, 1, writable=False)
    written = fill(shape, owner, 0)
    sharer.write_block(0, fd, 0)
    assert os.pread(fd, len(written), 0) == written
    with pytest.raises(RuntimeError, match="block 0 is read-only"):
        sharer.read_block(0, fd, 0)
    for move in (sharer.read_block, sharer.write_block):
        with pytest.raises(RuntimeError, match="block 1 is not mapped"):
            move(1, fd, 0)
        with pytest.raises(IndexError, match="range blocks"):
            move(8, fd, 0)
        for fd_, offset in ((2**31, 0), (fd, -1), (fd, 2**63 - 4 * PAGE)):
            with pytest.raises(IndexError):
                move(0, fd_, offset)
    assert os.fstat(fd).st_size == len(written)
