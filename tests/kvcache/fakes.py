"""A backend of pure Python that knows what a mapping or sharing mistake is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvcache.backend import Charge, Releases, Segment
from kvcache.layout import Group


class Manners(Enum):
    """How a system takes memory back: fields of a backend."""

    BLOCKS = (Releases.BLOCKS, Charge.BLOCKS)
    HEAPS = (Releases.HEAPS, Charge.HEAPS)
    IDLE = (Releases.IDLE, Charge.HEAPS)
    NOTHING = (Releases.NOTHING, Charge.HEAPS)
    ARENA = (Releases.NOTHING, Charge.ALL)

    @property
    def fields(self) -> dict[str, Any]:
        return dict(zip(("releases", "charge"), self.value, strict=True))

    @classmethod
    def drawn(cls, number: float) -> "Manners":
        """number: from 0 to 1."""
        if number < 0.7:
            return cls.BLOCKS
        return (cls.HEAPS, cls.HEAPS, cls.IDLE, cls.NOTHING, cls.NOTHING, cls.ARENA)[
            min(5, int((number - 0.7) * 20))
        ]


@dataclass
class FakeBackend:
    """Keeps what is mapped where. Operations with a ticket take effect, in order, when they
    complete: at once, or when ``complete`` is called or their ticket waited for.

    fail_at: the number of the call (counted from 1, over add_heap, add_buffer, map and map_ahead)
    that is refused, as a system without memory would refuse it.
    """

    group: Group
    name: str = "fake"
    releases: Releases = Releases.BLOCKS
    charge: Charge = Charge.BLOCKS
    zeroes_blocks: bool = False
    shares_blocks: bool = True
    mapping_limit: int | None = None
    heap_limit: int | None = None
    at_once: bool = True
    stuck: bool = False
    """Whether waiting for a ticket ends without it."""
    fail_at: int = 0
    refuse_ahead: bool = False
    """Whether every map_ahead is refused."""
    heaps: int = 0
    buffers: int = 0
    mapped: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(buffer, block) -> (heap, heap block)"""
    writable: set[tuple[int, int]] = field(default_factory=set)
    """Those (buffer, block) that are mapped writable."""
    touched: set[tuple[int, int]] = field(default_factory=set)
    """Blocks that hold memory: mapped once and not released since."""
    released: list[tuple[int, int, int]] = field(default_factory=list)
    copied_bytes: int = 0
    calls: int = 0
    issued: int = 0
    completed: int = 0
    _queue: list[Callable[[], None]] = field(default_factory=list)
    _ahead: dict[int, bool] = field(default_factory=dict)
    """Tickets of map_ahead that nobody has asked about -> whether it was refused."""

    def _refused(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def _ticket(self, operation: Callable[[], None]) -> int:
        self._queue.append(operation)
        self.issued += 1
        if self.at_once:
            self.complete()
        return self.issued

    def _complete(self, ticket: int) -> None:
        while self.completed < ticket:
            operation = self._queue.pop(0)
            operation()
            self.completed += 1

    def complete(self) -> None:
        """Everything that was queued is done."""
        self._complete(self.issued)

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

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        self._check_runs(buffer, block, heap, heap_block, count)
        if self._refused():
            return False
        self._map(buffer, block, heap, heap_block, count, writable)
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        self._check_runs(buffer, block, heap, heap_block, count)
        refused = self._refused() or self.refuse_ahead

        def operation() -> None:
            if not refused:
                self._map(buffer, block, heap, heap_block, count, writable=True)

        ticket = self._ticket(operation)
        self._ahead[ticket] = refused
        return ticket

    def refused(self, ticket: int) -> bool:
        assert ticket <= self.completed, "asked before the ticket has completed"
        assert ticket in self._ahead, "no map_ahead, or asked before"
        return self._ahead.pop(ticket)

    def unmap(self, buffer: int, block: int, count: int) -> int:
        def operation() -> None:
            for i in range(count):
                assert (buffer, block + i) in self.mapped, "unmapped without memory"
                del self.mapped[buffer, block + i]
                self.writable.discard((buffer, block + i))

        return self._ticket(operation)

    def release(self, heap: int, block: int, count: int) -> int:
        assert self.releases is not Releases.NOTHING, "memory is kept"
        whole = count == self.group.blocks_per_heap
        assert whole or self.releases is Releases.BLOCKS, "a part of a heap"
        self.released.append((heap, block, count))

        def operation() -> None:
            for i in range(count):
                assert not self._places(heap, block + i), "released while mapped"
                self.touched.discard((heap, block + i))

        return self._ticket(operation)

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        assert 0 < tokens <= self.group.tokens_per_block, "no part of a block"
        assert (source, source_block) in self.mapped, "copied from a block without memory"
        self._check_writable(target, target_block)
        self.copied_bytes += tokens * self.group.bytes_per_token

    def completed_ticket(self) -> int:
        return self.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        if self.stuck:
            return False
        self._complete(ticket)
        return True

    def committed_bytes(self) -> int:
        if self.charge is Charge.HEAPS:
            return len({heap for heap, _ in self.touched}) * self.group.heap_bytes
        if self.charge is Charge.ALL:
            return self.heaps * self.group.heap_bytes
        return len(self.touched) * self.group.block_bytes

    def rows(self, segments: Sequence[Segment]) -> Any:
        tokens = self.group.tokens_per_block
        for segment in segments:
            end = self.group.blocks_for(segment.start + segment.count)
            for block in range(end):
                assert (segment.buffer, block) in self.mapped, "a row without memory before it"
            for block in range(segment.start // tokens, end):
                self._check_writable(segment.buffer, block)
        return list(segments)

    def shut_down(self) -> bool:
        return not self.stuck

    # --- mistakes -------------------------------------------------------------------------------

    def _check_runs(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> None:
        assert count > 0, "no blocks"
        assert 0 <= buffer < self.buffers, "no such buffer"
        assert 0 <= heap < self.heaps, "no such heap"
        assert 0 <= heap_block <= self.group.blocks_per_heap - count, "beyond the heap"
        assert 0 <= block <= self.group.blocks_per_buffer - count, "beyond the buffer"

    def _places(self, heap: int, heap_block: int) -> list[tuple[int, int]]:
        """Where a block is mapped."""
        return [place for place, ref in self.mapped.items() if ref == (heap, heap_block)]

    def _map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> None:
        assert writable or self.shares_blocks, "read-only where nothing is shared"
        for i in range(count):
            ref, place = (heap, heap_block + i), (buffer, block + i)
            assert place not in self.mapped, "mapped twice"
            others = self._places(*ref)
            assert self.shares_blocks or not others, "one block at two places"
            assert not writable or self.writable.isdisjoint(others), "writable at two places"
            self.mapped[place] = ref
            if writable:
                self.writable.add(place)
            self.touched.add(ref)

    def _check_writable(self, buffer: int, block: int) -> None:
        """A block may be written through one mapping, and only as long as it is the only one."""
        place = (buffer, block)
        assert place in self.mapped, "written without memory"
        assert place in self.writable, "written where it is read-only"
        assert self._places(*self.mapped[place]) == [place], "written while it is shared"
