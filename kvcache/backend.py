"""The seam between sequences and device bytes.

A backend knows heaps, buffers and blocks by number and moves memory behind addresses. Nothing above
it knows which one runs.
"""

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import metal_ext
from kvcache.layout import Group

# Of the mappings that the system allows a process, those left to everything else in it.
SPARE_MAPPINGS = 4096
MAX_MAP_COUNT_FILE = Path("/proc/sys/vm/max_map_count")
# Every heap is an open file, and so is every client: heaps may be one file of two.
FILES_PER_HEAP = 2


@dataclass(slots=True)
class Segment:
    """Tokens [start, start + count) of the sequence in a buffer."""

    buffer: int
    start: int
    count: int


class BackendFailedError(RuntimeError):
    """A mapping operation failed on its thread: what is mapped is in doubt, serving must end."""


class PageBackend(Protocol):
    """What a substrate does. All calls come from the engine thread, except ``committed_bytes``.

    A block that stands in several buffers is writable in one of them at most.

    Tickets are numbers that rise; an operation is done when ``completed_ticket`` has reached its
    ticket.
    """

    name: str
    releases_blocks: bool
    """Whether less than a whole heap can be given back to the system."""
    mapping_limit: int | None
    """How many mappings the process may have for its buffers; None where nobody counts."""
    heap_limit: int | None
    """How many heaps the process may have; None where nobody counts."""
    shares_blocks: bool
    """Whether one block may stand in several buffers."""

    @property
    def copied_bytes(self) -> int:
        """K and V bytes that ``copy_block`` has copied."""

    def add_heap(self) -> bool:
        """Makes the next heap (0, 1, ...); False when the system refuses."""

    def add_buffer(self) -> bool:
        """Makes the next buffer (0, 1, ...); False when the system refuses."""

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        """Puts ``count`` blocks of a heap behind a buffer's; False, with nothing changed, when the
        system refuses. Blocks that are not writable need ``shares_blocks``."""

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        """Starts mapping writable blocks on another thread, memory included, so that the step that
        first writes there waits for nothing; returns the ticket. They count as mapped when it has
        completed and was not ``refused``."""

    def refused(self, ticket: int) -> bool:
        """Whether the system refused that ``map_ahead``, which has then changed nothing; to be
        asked once, when its ticket has completed."""

    def unmap(self, buffer: int, block: int, count: int) -> int:
        """Takes blocks from behind a buffer; returns the ticket."""

    def release(self, heap: int, block: int, count: int) -> int:
        """Gives the memory of unmapped blocks back to the system; returns the ticket."""

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        """Copies the first ``tokens`` tokens of a block of one buffer into a writable block of
        another, in all regions. Done when it returns, and after all steps that were started."""

    def completed_ticket(self) -> int:
        """The newest ticket such that all up to it are done. Raises BackendFailedError."""

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Waits for a ticket; False when the time passed first."""

    def committed_bytes(self) -> int:
        """What the system charges for all heaps. Any thread."""

    def row_table(self, segments: Sequence[Segment]) -> metal_ext.RowTable:
        """The rows of a step, in order."""

    def address_range(self, buffer: int) -> metal_ext.AddressRange:
        """The addresses of a buffer, for views that read it directly."""


def native_geometry(group: Group) -> metal_ext.Geometry:
    """A group's shape as the native side wants it."""
    return metal_ext.Geometry(
        page_bytes=group.page_bytes,
        tokens_per_block=group.tokens_per_block,
        blocks_per_heap=group.blocks_per_heap,
        blocks_per_range=group.blocks_per_buffer,
        region_row_bytes=[region.row_bytes for region in group.regions],
    )


class NativeBackend:
    """The substrates of this build: they differ in how a heap and a range are made, and no more."""

    def __init__(
        self,
        name: str,
        group: Group,
        new_heap: Callable[[metal_ext.Geometry], metal_ext.Heap],
        new_range: Callable[[metal_ext.Geometry], metal_ext.AddressRange],
        *,
        releases_blocks: bool,
        shares_blocks: bool,
        mapping_limit: int | None,
        heap_limit: int | None,
    ) -> None:
        self.name = name
        self.releases_blocks = releases_blocks
        self.shares_blocks = shares_blocks
        self.mapping_limit = mapping_limit
        self.heap_limit = heap_limit
        self._geometry = native_geometry(group)
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
            self._heaps.append(self._new_heap(self._geometry))
        except OSError:
            return False
        return True

    def add_buffer(self) -> bool:
        try:
            self._ranges.append(self._new_range(self._geometry))
        except OSError:
            return False
        return True

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        try:
            self._ranges[buffer].map(self._heaps[heap], heap_block, block, count, writable)
        except OSError:
            return False
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        return self._mapper.map(self._ranges[buffer], self._heaps[heap], heap_block, block, count)

    def refused(self, ticket: int) -> bool:
        return self._mapper.refused(ticket)

    def unmap(self, buffer: int, block: int, count: int) -> int:
        return self._mapper.unmap(self._ranges[buffer], block, count)

    def release(self, heap: int, block: int, count: int) -> int:
        return self._mapper.release(self._heaps[heap], block, count)

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        import mlx.core as mx  # comes after metal_ext, which loads the BLAS

        # MLX's stream runs in order what was started: no step's cache token is needed.
        from_, to = self._ranges[source], self._ranges[target]
        token = mx.zeros((1,))
        mx.eval(
            metal_ext.block_copy(token, from_, source_block, to, target_block, tokens, self._copies)
        )

    def completed_ticket(self) -> int:
        if self._mapper.failure:
            raise BackendFailedError(f"the mapper thread failed: {self._mapper.failure}")
        return self._mapper.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return self._mapper.wait(ticket, timeout_s)

    def committed_bytes(self) -> int:
        return sum(heap.committed_bytes for heap in tuple(self._heaps))

    def row_table(self, segments: Sequence[Segment]) -> metal_ext.RowTable:
        ranges = self._ranges
        return metal_ext.RowTable([(ranges[s.buffer], s.start, s.count) for s in segments])

    def address_range(self, buffer: int) -> metal_ext.AddressRange:
        return self._ranges[buffer]


def posix_backend(group: Group) -> PageBackend:
    """Shared-memory heaps mapped behind reserved addresses: Linux, and a Mac's CPU."""
    return NativeBackend(
        "posix",
        group,
        metal_ext.Heap.shared,
        metal_ext.AddressRange.sparse,
        releases_blocks=sys.platform == "linux",
        shares_blocks=True,
        mapping_limit=system_mapping_limit(),
        heap_limit=system_heap_limit(),
    )


def dense_backend(group: Group) -> PageBackend:
    """One full-context allocation per buffer: anything that can allocate."""
    return NativeBackend(
        "dense",
        group,
        metal_ext.Heap.dense,
        metal_ext.AddressRange.dense,
        releases_blocks=True,
        shares_blocks=False,
        mapping_limit=None,
        heap_limit=None,
    )


def system_mapping_limit() -> int | None:
    """Mappings that buffers may use: ``vm.max_map_count`` less a reserve; None on a Mac."""
    try:
        return max(0, int(MAX_MAP_COUNT_FILE.read_text()) - SPARE_MAPPINGS)
    except OSError:
        return None


def system_heap_limit() -> int | None:
    """Heaps that may be open files: half of the hard limit; None where there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard // FILES_PER_HEAP


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files to the hard one: every heap and every client is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
