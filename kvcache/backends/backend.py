"""Interfaces of the memory that the cache uses: for K and V, and for recurrent states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx

import metal_ext
from kvcache.layout import Group, SlotLayout
from kvcache.slots import StateSegment
from metal_ext import GatedDelta, QKTransform, Softmax

# A mapping operation that takes longer than this counts as failed. The limit is shorter than the
# watchdog's for a hanging step (server/config.py), so that the error can name the mapping.
MAPPING_LIMIT_S = 20.0


@dataclass(slots=True)
class Segment:
    """The tokens [start, start + count) that a step computes for the sequence in a buffer."""

    buffer: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class LayerRegions:
    """The place of one layer's K and V within each buffer, and the shape of one token's row."""

    group: int
    keys: int
    values: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    native: metal_ext.Layer


class Releases(Enum):
    """The parts of a backend's memory that can go back to the system before the process ends. The
    system counts memory as used by the same parts."""

    BLOCKS = "any blocks, at any time: each counts from its first mapping"
    HEAPS = "whole heaps, at any time: each counts, in full, from when it is made, or mapped again"
    IDLE = "whole heaps, when nothing runs"
    NOTHING = "none: heaps are kept"
    ARENA = "none: all heaps are made, and count, at the start"

    @property
    def keeps_heaps(self) -> bool:
        return self in (Releases.NOTHING, Releases.ARENA)


class BackendFailedError(RuntimeError):
    """The mapping thread or the device failed. Serving must end, because mappings may be wrong."""


class StepRows(ABC):
    """Runs a backend's kernels over the rows (tokens) of one step. In all methods, ``order`` is a
    layer's ordering handle: a one-element array that makes reads of K and V wait for writes."""

    def __init__(
        self,
        begin: Callable[[list[tuple[metal_ext.AddressRange, int, int]]], Any],
        executor: Any,
        segments: Sequence[Segment],
        ranges: list[metal_ext.AddressRange],
    ) -> None:
        """``begin`` is RowTable with CpuWorkers as executor, or MetalKVBackend.rows with its
        backend. ``ranges`` are the address ranges by buffer number."""
        self.native = begin([(ranges[s.buffer], s.start, s.count) for s in segments])
        self._executor = executor
        self._segments = segments
        self._ranges = ranges

    def append(
        self,
        order: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        transform: QKTransform | None,
    ) -> tuple[mx.array, mx.array]:
        """Apply ``transform``, unless it is None, to queries and keys. Then write keys and values.
        Return the layer's next ordering handle, and the queries. Queries are
        ``[T, query_heads, head_dim]``, keys and values ``[T, kv_heads, head_dim]``."""
        where = self.native, layer.native, self._executor
        if transform is None:
            return metal_ext.append(order, keys, values, *where), queries
        rope = None if transform.rope is None else self._rope(transform.rope)
        return metal_ext.project_append(order, queries, keys, values, transform.norms, rope, *where)

    def decode_attention(
        self, order: mx.array, layer: LayerRegions, queries: mx.array, softmax: Softmax
    ) -> mx.array:
        """Return the attention of the step's first rows; ``queries`` has a row for each. Each row
        attends to its own sequence's tokens, up to and including itself."""
        return metal_ext.decode_attention(
            order, queries, self.native, 0, layer.native, layer.kv_heads, softmax, self._executor
        )

    @abstractmethod
    def _rope(self, rope: metal_ext.RopeTable) -> Any:
        """Return the rotation in the form that this backend's kernels take."""

    @abstractmethod
    def chunk_attention(
        self,
        order: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        segment: int,
        softmax: Softmax,
    ) -> mx.array:
        """Return the attention of all rows of segment number ``segment``. Each row attends to its
        sequence's tokens, up to and including itself."""

    @abstractmethod
    def region(self, order: mx.array, layer: LayerRegions, kind: str, segment: int) -> mx.array:
        """Return all keys or all values of a segment's sequence up to the segment's end, as
        ``[tokens, kv_heads, head_dim]``. ``kind`` is "keys" or "values". Valid until the sequence
        closes."""

    def end(self, arrays: list[mx.array]) -> list[mx.array]:
        """Return the arrays to evaluate instead of ``arrays``, which are the step's results and all
        layers' newest ordering handles. Evaluating them also signals the step's end on a GPU."""
        return arrays

    def cancel(self) -> None:  # noqa: B027  # a CPU has nothing to cancel
        """Cancel a failed step. All operations of the step must have ended."""


class PageBackend(Protocol):
    """The memory for the K and V of one group of layers. Heaps are large pieces of memory, divided
    into blocks. Buffers are address ranges in which blocks are mapped. A block is writable in one
    buffer at most.

    Only the engine thread may call methods, except ``committed_bytes``, ``write_block`` and
    ``read_block``, and ``completed_ticket`` while the engine thread hangs. Operations on other
    threads get tickets, which are rising numbers."""

    name: str
    releases: Releases
    zeroes_blocks: bool
    """True if a block holds zeros after it was mapped writable. Only self-tests read this."""
    mapping_limit: int | None
    """The most mappings that all buffers together may have, or None without a limit."""
    heap_limit: int | None
    shares_blocks: bool
    maps_while_running: bool
    """True if mappings may change while steps run. If False, mappings may change only at a mapping
    point: from the end of the last running step until ``finish_mappings`` returns."""

    @property
    def copied_bytes(self) -> int:
        """The bytes of K and V that ``copy_block`` has copied since the start."""

    @property
    def late_signals(self) -> int:
        """The number of mapping points that waited for the signal of a step that had been read."""

    @property
    def command_buffers(self) -> int:
        """The number of MLX's command buffers so far with work on this memory; 0 on a CPU."""

    def add_heap(self) -> bool:
        """Make a heap with the next number (0, 1, ...). Return False if the system refuses."""

    def add_buffer(self) -> bool:
        """Make a buffer with the next number (0, 1, ...). Return False if the system refuses."""

    def commit_heap(self, heap: int) -> bool:
        """Allocate a released heap's memory again, before its blocks are mapped. Return False if
        the system refuses. Do nothing in a backend whose ``map`` allocates memory."""

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        """Map ``count`` adjacent blocks of a heap in a buffer. The first one has the index
        ``heap_block`` in the heap, and is mapped at index ``block`` of the buffer. Return False and
        change nothing if the system refuses. ``writable`` may be False only if the backend has
        ``shares_blocks``. Without ``maps_while_running``, ``finish_mappings`` must follow."""

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        """Let another thread map blocks as writable, and return the ticket. The blocks are usable
        once the ticket is done and ``refused`` has returned False. Needs ``maps_while_running``."""

    def refused(self, ticket: int) -> bool:
        """Return True if the system refused a completed ``map_ahead``, which then changed nothing.
        May be called once per ticket."""

    def unmap(self, buffer: int, block: int, count: int) -> int:
        """Start unmapping blocks of a buffer, and return the ticket of the operation."""

    def release(self, heap: int, block: int, count: int) -> int:
        """Start giving the memory of unmapped blocks back to the system, and return the ticket."""

    def finish_mappings(self) -> None:
        """Wait until all changes of mappings are in effect. Must precede ``copy_block`` and
        ``rows``. Does nothing if ``maps_while_running`` is true. Raises BackendFailedError."""

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        """Copy the K and V of a block's first ``tokens`` tokens to a writable block of another
        buffer. This call waits until all earlier steps and the copy are complete."""

    def write_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        """Write a block's bytes, region by region, to an open file at ``offset``, and return their
        CRC-32C. The block must be mapped, and must not change, until this returns. Any thread may
        call this. Raises OSError."""

    def read_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        """Fill a block with what ``write_block`` has written, and return the CRC-32C of the bytes.
        The block must be mapped writable, and unused, until this returns. Any thread may call this.
        Raises OSError, with EIO if the file ends before the block does, and leaves the block
        partly filled then."""

    def completed_ticket(self) -> int:
        """Return the newest ticket up to which all operations are done. May raise
        BackendFailedError."""

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait until a ticket's operation is done. Return False if ``timeout_s`` passes first."""

    def committed_bytes(self) -> int:
        """Return the bytes that the system counts as used by heaps. Any thread may call this."""

    def rows(self, segments: Sequence[Segment]) -> StepRows:
        """Return the rows of a step. The caller must later call ``end`` or ``cancel`` on the
        rows."""

    def shut_down(self) -> bool:
        """Wait for the device and unmap everything. No other call may follow. Return False if the
        device did not answer; the process must then end without releasing memory."""


class StateRows:
    """Runs the kernel that advances the recurrent states of a step's sequences."""

    def __init__(self, layout: SlotLayout, native: Any, executor: Any) -> None:
        self._layout = layout
        self._native = native
        self._executor = executor

    def recur(
        self,
        order: mx.array,
        number: int,
        qkv: mx.array,
        z: mx.array,
        a: mx.array,
        b: mx.array,
        delta: GatedDelta,
    ) -> tuple[mx.array, mx.array]:
        """Advance the states of the recurrent layer ``number`` by all rows of the step. Return the
        layer's next ordering handle and output ``[T, value_heads * value_dim]``.

        ``number`` counts recurrent layers only. ``qkv`` is the input of the layer's convolution,
        ``[T, tail_width]``. ``z`` has the output's shape. ``a`` and ``b`` are
        ``[T, value_heads]``."""
        offset = self._layout.offsets[number]
        return metal_ext.gated_delta(
            order, qkv, z, a, b, delta, self._native, offset, self._executor
        )


class StateMemory(Protocol):
    """Memory for state slots. A slot holds the states of all recurrent layers of one sequence."""

    releases_slots: bool
    """True if ``release`` gives memory back to the system."""

    @property
    def num_slots(self) -> int: ...

    def commit(self, slot: int) -> bool:
        """Allocate a slot's memory, unless it has some, before the rows of the step that first uses
        the slot are made. Return False if the system refuses."""

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Return the rows of a step. ``segments`` has one item per sequence, in the order of the
        rows. ``step`` has the K and V rows of the same step. The slots are in use until that step
        ends."""

    def write_record(self, slot: int, fd: int, offset: int) -> int:
        """Write a slot's bytes to an open file at ``offset``, and return their CRC-32C. The slot
        must have memory, and must not change, until this returns. Any thread may call this. Raises
        OSError."""

    def read_record(self, slot: int, fd: int, offset: int) -> int:
        """Fill a slot with what ``write_record`` has written, and return the CRC-32C of the bytes.
        The slot must have memory, and be unused, until this returns. Any thread may call this.
        Raises OSError, as ``PageBackend.read_block`` does."""

    def committed_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes that the system counts as used by ``slots``, measured a short time ago.
        ``slots`` must be all slots that may hold memory."""

    def release(self, slots: Sequence[int]) -> None:
        """Give the memory of slots back to the system where possible. The slots stay usable."""


def file_checksum(file: int, nbytes: int) -> int:
    """Return the CRC-32C of an open file's first bytes, as ``write_block`` does. Raises OSError."""
    return metal_ext.StateMemory(nbytes).read_record(0, nbytes, file, 0)


def native_geometry(group: Group) -> metal_ext.Geometry:
    return metal_ext.Geometry(
        page_bytes=group.page_bytes,
        tokens_per_block=group.tokens_per_block,
        blocks_per_heap=group.blocks_per_heap,
        blocks_per_range=group.blocks_per_buffer,
        region_row_bytes=[region.row_bytes for region in group.regions],
        ring_blocks=group.ring_blocks if group.has_ring else 0,
    )
