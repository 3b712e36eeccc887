"""Heaps and ranges of the extension, by number, and its mapper: what its substrates share."""

from collections.abc import Callable

import metal_ext


class NativeMemory:
    """The base of backends. How a heap and a range are made is theirs, and what may be mapped where
    and when."""

    def __init__(
        self,
        new_heap: Callable[[], metal_ext.Heap],
        new_range: Callable[[], metal_ext.AddressRange],
    ) -> None:
        """Both raise OSError where the system has no memory for one more."""
        self._new_heap = new_heap
        self._new_range = new_range
        self._heaps: list[metal_ext.Heap] = []
        self._ranges: list[metal_ext.AddressRange] = []
        self._mapper = metal_ext.Mapper()
        self._copies = metal_ext.CopyCounter()

    @property
    def copied_bytes(self) -> int:
        return self._copies.bytes

    def add_heap(self) -> bool:
        try:
            self._heaps.append(self._new_heap())
        except OSError:
            return False
        return True

    def add_buffer(self) -> bool:
        try:
            self._ranges.append(self._new_range())
        except OSError:
            return False
        return True

    def refused(self, ticket: int) -> bool:
        return self._mapper.refused(ticket)

    def unmap(self, buffer: int, block: int, count: int) -> int:
        return self._mapper.unmap(self._ranges[buffer], block, count)

    def release(self, heap: int, block: int, count: int) -> int:
        return self._mapper.release(self._heaps[heap], block, count)

    def committed_bytes(self) -> int:
        return sum(heap.committed_bytes for heap in tuple(self._heaps))

    def _map_queued(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, *, writable: bool
    ) -> int:
        """The ticket of a mapping that the mapper's thread will make."""
        range_, memory = self._ranges[buffer], self._heaps[heap]
        return self._mapper.map(range_, memory, heap_block, block, count, writable)
