"""Geometries whose figures a test can compute with, and the bytes behind an address."""

import ctypes
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from metal_ext import SYSTEM_PAGE_BYTES, AddressRange, Geometry, Heap, Mapper

PAGE = SYSTEM_PAGE_BYTES
WAIT_S = 30.0


@dataclass(frozen=True)
class Shape:
    """What a Geometry is made of. By default regions of one, two and one pages a block."""

    page_bytes: int = PAGE
    tokens_per_block: int = 16
    blocks_per_heap: int = 8
    blocks_per_range: int = 8
    rows: tuple[int, ...] = (PAGE // 16, PAGE // 8, PAGE // 16)

    def geometry(self, **changes: object) -> Geometry:
        shape = replace(self, **changes)  # type: ignore[arg-type]
        return Geometry(
            page_bytes=shape.page_bytes,
            tokens_per_block=shape.tokens_per_block,
            blocks_per_heap=shape.blocks_per_heap,
            blocks_per_range=shape.blocks_per_range,
            region_row_bytes=list(shape.rows),
        )

    def block_bytes(self, region: int) -> int:
        return self.rows[region] * self.tokens_per_block

    def offset(self, region: int, block: int) -> int:
        """Bytes from a range's base to a block of a region."""
        before = sum(self.block_bytes(r) for r in range(region)) * self.blocks_per_range
        return before + block * self.block_bytes(region)

    def block(self, range_: AddressRange, region: int, block: int) -> NDArray[np.uint8]:
        """The bytes of a block of a region, in place."""
        return bytes_at(range_.base_address + self.offset(region, block), self.block_bytes(region))

    def mapped(self, count: int, heap: Heap | None = None) -> AddressRange:
        """A range with memory behind its first blocks, which are the first of the heap."""
        made = AddressRange.sparse(self.geometry())
        made.map(heap or Heap.shared(self.geometry()), 0, 0, count, writable=True)
        return made


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """Memory as an array, in place; reading it without memory behind it is SIGSEGV."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def whole_block_tokens(row_bytes: int, page_bytes: int = PAGE) -> int:
    """A block of at least 16 tokens that is whole pages."""
    least = page_bytes // math.gcd(page_bytes, row_bytes)
    return least * -(-16 // least)


def unmapped(mapper: Mapper, range_: AddressRange, block: int, count: int) -> None:
    """Unmaps, waits, and expects that it went well."""
    assert mapper.wait(mapper.unmap(range_, block, count), WAIT_S)
    assert mapper.failure == ""
