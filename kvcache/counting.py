"""Memory for simulations of the cache, which counts committed bytes but stores no data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvcache.backend import Charge, Releases, Segment, StateRows, StepRows
from kvcache.layout import Group
from kvcache.slot_pool import StateSegment


@dataclass
class CountingBackend:
    """A PageBackend that grants every request at once. As on Linux, a block counts as committed
    from its first mapping until its release."""

    group: Group
    name: str = "counting"
    releases: Releases = Releases.BLOCKS
    charge: Charge = Charge.BLOCKS
    zeroes_blocks: bool = False
    shares_blocks: bool = True
    maps_while_running: bool = True
    mapping_limit: int | None = None
    heap_limit: int | None = None
    copied_bytes: int = 0
    _committed: set[tuple[int, int]] = field(default_factory=set)
    _ticket: int = 0

    def add_heap(self) -> bool:
        return True

    def add_buffer(self) -> bool:
        return True

    def commit_heap(self, heap: int) -> bool:
        return True

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        self._committed.update((heap, heap_block + i) for i in range(count))
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        self.map(buffer, block, heap, heap_block, count, True)
        return self._next_ticket()

    def refused(self, ticket: int) -> bool:
        return False

    def unmap(self, buffer: int, block: int, count: int) -> int:
        return self._next_ticket()

    def release(self, heap: int, block: int, count: int) -> int:
        self._committed.difference_update((heap, block + i) for i in range(count))
        return self._next_ticket()

    def finish_mappings(self) -> None: ...

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        self.copied_bytes += tokens * self.group.bytes_per_token

    def completed_ticket(self) -> int:
        return self._ticket

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return True

    def committed_bytes(self) -> int:
        return len(self._committed) * self.group.block_bytes

    def rows(self, segments: Sequence[Segment]) -> StepRows:
        """Return the segments in place of rows, because simulations run no kernels."""
        return cast(StepRows, tuple(segments))

    def shut_down(self) -> bool:
        return True

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket


@dataclass
class CountingStates:
    """State slots for simulations. A slot is committed from its first write until its release."""

    num_slots: int
    slot_bytes: int
    _committed: set[int] = field(default_factory=set)

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Count the written slots as committed. Return the segments in place of rows."""
        self._committed.update(slot for segment in segments for _, slot in segment.writes)
        return cast(StateRows, tuple(segments))

    def release(self, slots: Sequence[int]) -> None:
        self._committed.difference_update(slots)

    def committed_bytes(self, slots: Iterable[int]) -> int:
        return len(self._committed.intersection(slots)) * self.slot_bytes
