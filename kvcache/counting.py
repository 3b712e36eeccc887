"""A substrate and cells without bytes: they count what others would commit, for simulations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvcache.backend import Charge, Releases, Segment, StateRows, StepRows
from kvcache.cell_pool import StateSegment
from kvcache.layout import Group


@dataclass
class CountingBackend:
    """Grants everything, and is done with it at once.

    A block is committed from its first mapping until its memory is released, as on Linux.
    """

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
    """(heap, block)"""
    _ticket: int = 0

    def add_heap(self) -> bool:
        """Return True: there is always one more."""
        return True

    def add_buffer(self) -> bool:
        """Return True: there is always one more."""
        return True

    def commit_heap(self, heap: int) -> bool:
        """Return True: memory comes with the mapping."""
        return True

    def map(
        self,
        buffer: int,
        block: int,
        heap: int,
        heap_block: int,
        count: int,
        writable: bool,
    ) -> bool:
        self._committed.update((heap, heap_block + i) for i in range(count))
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        """Commit the blocks; done already."""
        self.map(buffer, block, heap, heap_block, count, True)
        return self._next_ticket()

    def refused(self, ticket: int) -> bool:
        """Return False: nothing is refused."""
        return False

    def unmap(self, buffer: int, block: int, count: int) -> int:
        """Unmap blocks: they keep their memory until it is released."""
        return self._next_ticket()

    def release(self, heap: int, block: int, count: int) -> int:
        """Release the blocks: they are no longer committed."""
        self._committed.difference_update((heap, block + i) for i in range(count))
        return self._next_ticket()

    def finish_mappings(self) -> None:
        """Everything is done."""

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        """Count the bytes."""
        self.copied_bytes += tokens * self.group.bytes_per_token

    def completed_ticket(self) -> int:
        """Return the newest ticket: all are done."""
        return self._ticket

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def committed_bytes(self) -> int:
        """Return the bytes of all blocks that hold memory."""
        return len(self._committed) * self.group.block_bytes

    def rows(self, segments: Sequence[Segment]) -> StepRows:
        """Return the segments in place of rows: nobody follows them to memory."""
        return cast(StepRows, tuple(segments))

    def shut_down(self) -> bool:
        """Return True: there is nothing to end."""
        return True

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket


@dataclass
class CountingStates:
    """Cells, each committed from its first write until it is released."""

    num_cells: int
    cell_bytes: int
    _committed: set[int] = field(default_factory=set)

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Return the segments in place of rows, and commit what they write. step: not looked at."""
        self._committed.update(cell for its in segments for _, cell in its.writes)
        return cast(StateRows, tuple(segments))

    def release(self, cells: Sequence[int]) -> None:
        """Release cells: they are no longer committed."""
        self._committed.difference_update(cells)

    def committed_bytes(self, cells: Iterable[int]) -> int:
        """Return the bytes of those of the cells that hold memory."""
        return len(self._committed.intersection(cells)) * self.cell_bytes
