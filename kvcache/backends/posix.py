"""Memory of K and V on a CPU, and a base class that Metal's backends share."""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import (
    BackendFailedError,
    LayerRegions,
    Releases,
    Segment,
    StateRows,
    StepRows,
    native_geometry,
)
from kvcache.layout import Group, SlotLayout
from kvcache.slots import StateSegment


class NativeMemory:
    """Numbered heaps and address ranges of the native extension, and the thread that maps them."""

    def __init__(
        self,
        new_heap: Callable[[], metal_ext.Heap],
        new_range: Callable[[], metal_ext.AddressRange],
    ) -> None:
        """Both functions raise OSError if the system refuses memory."""
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

    def write_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        return self._ranges[buffer].write_block(block, fd, offset)

    def read_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        return self._ranges[buffer].read_block(block, fd, offset)

    def committed_bytes(self) -> int:
        return sum(heap.committed_bytes for heap in tuple(self._heaps))

    def _map_queued(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, *, writable: bool
    ) -> int:
        range_, memory = self._ranges[buffer], self._heaps[heap]
        return self._mapper.map(range_, memory, heap_block, block, count, writable)


# The time between measurements of committed bytes, which take half a millisecond per gigabyte.
MEASURED_EVERY_S = 0.5


class NativeStates:
    """State slots, adjacent in memory. A slot occupies memory from its first write on."""

    releases_slots = True

    def __init__(
        self,
        layout: SlotLayout,
        num_slots: int,
        workers: metal_ext.CpuWorkers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError if the system refuses the addresses."""
        self.num_slots = num_slots
        self._layout = layout
        self._workers = workers
        self._memory = metal_ext.StateMemory(num_slots * layout.slot_bytes)
        self._clock = clock
        self._committed_bytes = 0
        self._measured_at = float("-inf")

    def commit(self, slot: int) -> bool:
        return True  # a slot gets memory when it is written

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """``step`` is not used: on a CPU, MLX's stream runs the operations in order."""
        native = [
            (
                segment.count,
                0 if segment.read is None else self._address(segment.read),
                [(rows, self._address(slot)) for rows, slot in segment.writes],
            )
            for segment in segments
        ]
        rows = metal_ext.StateRows(native, [self._memory])
        return StateRows(self._layout, rows, self._workers)

    def write_record(self, slot: int, fd: int, offset: int) -> int:
        size = self._layout.slot_bytes
        return self._memory.write_record(slot * size, size, fd, offset)

    def read_record(self, slot: int, fd: int, offset: int) -> int:
        self._measured_at = float("-inf")
        size = self._layout.slot_bytes
        return self._memory.read_record(slot * size, size, fd, offset)

    def committed_bytes(self, slots: Sequence[int]) -> int:
        if (now := self._clock()) - self._measured_at >= MEASURED_EVERY_S:
            self._measured_at, size = now, self._layout.slot_bytes
            parts = (self._memory.committed(slot * size, size) for slot in slots)
            self._committed_bytes = sum(parts)
        return self._committed_bytes

    def release(self, slots: Sequence[int]) -> None:
        """Give the memory of slots back to the system. The slots hold zeros afterwards."""
        size = self._layout.slot_bytes
        for slot in slots:
            self._memory.release(slot * size, size)
            self._measured_at = float("-inf")

    def _address(self, slot: int) -> int:
        return self._memory.address + slot * self._layout.slot_bytes


# The number of mappings that buffers leave to other parts of the process.
SPARE_MAPPINGS = 4096
MAX_MAP_COUNT_FILE = Path("/proc/sys/vm/max_map_count")
# One heap is allowed per this many files that the process may open. Sockets need the rest.
FILES_PER_HEAP = 2


class NativeStepRows(StepRows):
    """Runs the CPU's kernels over the rows of a step."""

    def __init__(
        self,
        segments: Sequence[Segment],
        ranges: list[metal_ext.AddressRange],
        workers: metal_ext.CpuWorkers,
    ) -> None:
        super().__init__(metal_ext.RowTable, workers, segments, ranges)
        self._angles: dict[metal_ext.RopeTable, mx.array] = {}
        """The rotation angles (RoPE) of the step's rows. All layers use the same angles."""

    def _rope(self, rope: metal_ext.RopeTable) -> mx.array:
        if rope not in self._angles:
            self._angles[rope] = metal_ext.rope_angles(self.native, rope, self._executor)
        return self._angles[rope]

    def chunk_attention(
        self,
        order: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        segment: int,
        softmax: metal_ext.Softmax,
    ) -> mx.array:
        where = self.native, segment, layer.native, layer.kv_heads
        return metal_ext.chunk_attention(order, queries, *where, softmax, self._executor)

    def region(self, order: mx.array, layer: LayerRegions, kind: str, segment: int) -> mx.array:
        rows = self._segments[segment]
        region = layer.keys if kind == "keys" else layer.values
        shape = rows.start + rows.count, layer.kv_heads, layer.head_dim
        return metal_ext.region_view(order, self._ranges[rows.buffer], region, *shape, layer.dtype)


class PosixBackend(NativeMemory):
    """Heaps in shared memory, which are mapped at reserved addresses. The calling thread maps
    blocks that a step needs now; the mapper's thread maps ahead of need."""

    name = "posix"
    shares_blocks = True
    zeroes_blocks = False
    maps_while_running = True
    late_signals = command_buffers = 0

    def __init__(self, group: Group, workers: metal_ext.CpuWorkers, *, num_groups: int = 1) -> None:
        """``num_groups`` groups of layers share the process's limits equally."""
        geometry = native_geometry(group)
        super().__init__(
            lambda: metal_ext.Heap.shared(geometry), lambda: metal_ext.AddressRange.sparse(geometry)
        )
        # macOS charges and releases an object of shared memory only as a whole.
        self.releases = Releases.BLOCKS if sys.platform == "linux" else Releases.HEAPS
        mappings, heaps = system_mapping_limit(), system_heap_limit()
        self.mapping_limit = None if mappings is None else mappings // num_groups
        self.heap_limit = None if heaps is None else heaps // num_groups
        self._workers = workers

    def commit_heap(self, heap: int) -> bool:
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
        return self._map_queued(buffer, block, heap, heap_block, count, writable=True)

    def finish_mappings(self) -> None: ...

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        # MLX's stream runs the copy after earlier steps, so that no ordering handle is needed.
        blocks = self._ranges[source], source_block, self._ranges[target], target_block
        mx.eval(metal_ext.block_copy(mx.zeros((1,)), *blocks, tokens, self._copies))

    def completed_ticket(self) -> int:
        if self._mapper.failure:
            raise BackendFailedError(f"the mapper thread failed: {self._mapper.failure}")
        return self._mapper.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return self._mapper.wait(ticket, timeout_s)

    def rows(self, segments: Sequence[Segment]) -> NativeStepRows:
        return NativeStepRows(segments, self._ranges, self._workers)

    def shut_down(self) -> bool:
        return True


def system_mapping_limit() -> int | None:
    """Return the limit of buffers' mappings: vm.max_map_count less a reserve, or None on a Mac."""
    try:
        return max(0, int(MAX_MAP_COUNT_FILE.read_text()) - SPARE_MAPPINGS)
    except OSError:
        return None


def system_heap_limit() -> int | None:
    """Return how many heaps may exist: half of the files that may be open, or None (no limit)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft // FILES_PER_HEAP


def system_file_limit() -> int | None:
    """Return the largest size of a heap in bytes (on Linux, of a file), or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if sys.platform != "linux" or soft == resource.RLIM_INFINITY else soft
