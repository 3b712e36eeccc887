"""A backend of pure Python that knows what a mapping mistake is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.backend import Segment
from kvcache.layout import Group


@dataclass
class FakeBackend:
    """Keeps what is mapped where. Tickets complete when ``complete`` is called, or at once.

    fail_at: the number of the call (counted from 1, over add_heap, add_buffer and map) that is
    refused, as a system without memory would refuse it.
    """

    group: Group
    name: str = "fake"
    releases_blocks: bool = True
    mapping_limit: int | None = None
    at_once: bool = True
    stuck: bool = False
    """Whether waiting for a ticket ends without it."""
    fail_at: int = 0
    heaps: int = 0
    buffers: int = 0
    mapped: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(buffer, block) -> (heap, heap block)"""
    touched: set[tuple[int, int]] = field(default_factory=set)
    """Blocks that hold memory: mapped once and not released since."""
    released: list[tuple[int, int, int]] = field(default_factory=list)
    calls: int = 0
    issued: int = 0
    completed: int = 0

    def _refused(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def _ticket(self) -> int:
        self.issued += 1
        if self.at_once:
            self.completed = self.issued
        return self.issued

    def complete(self) -> None:
        """Everything that was queued is done."""
        self.completed = self.issued

    def add_heap(self) -> bool:
        if self._refused():
            return False
        self.heaps += 1
        return True

    def add_buffer(self) -> bool:
        if self._refused():
            return False
        self.buffers += 1
        return True

    def map(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> bool:
        if self._refused():
            return False
        assert 0 <= buffer < self.buffers
        assert 0 <= heap < self.heaps
        assert heap_block + count <= self.group.blocks_per_heap
        assert block + count <= self.group.blocks_per_buffer
        for i in range(count):
            assert (buffer, block + i) not in self.mapped, "mapped twice"
            assert (heap, heap_block + i) not in self.mapped.values(), "one block at two places"
            self.mapped[buffer, block + i] = (heap, heap_block + i)
            self.touched.add((heap, heap_block + i))
        return True

    def unmap(self, buffer: int, block: int, count: int) -> int:
        for i in range(count):
            del self.mapped[buffer, block + i]
        return self._ticket()

    def release(self, heap: int, block: int, count: int) -> int:
        assert self.releases_blocks or count == self.group.blocks_per_heap
        for i in range(count):
            assert (heap, block + i) not in self.mapped.values(), "released while mapped"
            self.touched.discard((heap, block + i))
        self.released.append((heap, block, count))
        return self._ticket()

    def completed_ticket(self) -> int:
        return self.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        if self.stuck:
            return False
        self.completed = max(self.completed, ticket)
        return True

    def committed_bytes(self) -> int:
        return len(self.touched) * self.group.block_bytes

    def row_table(self, segments: Sequence[Segment]) -> Any:
        for segment in segments:
            end = self.group.blocks_for(segment.start + segment.count)
            assert all((segment.buffer, block) in self.mapped for block in range(end))
        return list(segments)

    def address_range(self, buffer: int) -> Any:
        return buffer
