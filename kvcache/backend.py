"""The protocol between the cache and device memory, by numbers of heaps, buffers and blocks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx

import metal_ext
from kvcache.layout import Group, SlotLayout
from kvcache.slot_pool import StateSegment
from metal_ext import GatedDelta, QKTransform

# A mapping operation that takes longer than this has failed. The limit is below the engine
# watchdog's (server/config.py), which cannot name the reason for a hanging step.
MAPPING_LIMIT_S = 20.0


@dataclass(slots=True)
class Segment:
    """Tokens [start, start + count) of one sequence, whose memory is the buffer."""

    buffer: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class LayerRegions:
    """Where a layer's K and V lie in a buffer (their regions), and the shape of their rows."""

    group: int
    keys: int
    values: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    native: metal_ext.Layer


class Releases(Enum):
    """The memory that can go back to the system before the process ends."""

    BLOCKS = "any blocks, at any time"
    HEAPS = "whole heaps, at any time"
    IDLE = "whole heaps, when nothing runs"
    NOTHING = "none: heaps are kept"


class Charge(Enum):
    """The moment from which the system charges the process for memory of heaps."""

    BLOCKS = "each block from its first mapping"
    HEAPS = "each heap, in full, from when it is made, or mapped again after a release"
    ALL = "all heaps, in full, from the start"


class BackendFailedError(RuntimeError):
    """The mapping thread or the device failed: mappings are in doubt, and serving must end."""


class StepRows(ABC):
    """The rows (tokens) of one step, and the backend's kernels over them. ``order`` is the
    layer's ordering handle: a one-element array that makes reads of K and V wait for writes."""

    def __init__(self, native: Any, executor: Any) -> None:
        """native, executor: RowTable and CpuWorkers, or on a GPU MetalRows and MetalKVBackend."""
        self.native = native
        self._executor = executor

    def append(
        self,
        order: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        transform: QKTransform | None,
    ) -> tuple[mx.array, mx.array]:
        """Apply ``transform`` (unless None) to queries and keys, and write keys and values; return
        the next ordering handle and the queries. queries: ``[T, query_heads, head_dim]``; keys,
        values: ``[T, kv_heads, head_dim]``; all three have one dtype and may have any strides."""
        where = self.native, layer.native, self._executor
        if transform is None:
            return metal_ext.append(order, keys, values, *where), queries
        rope = None if transform.rope is None else self._rope(transform.rope)
        return metal_ext.project_append(order, queries, keys, values, transform.norms, rope, *where)

    def decode_attention(
        self, order: mx.array, layer: LayerRegions, queries: mx.array, scale: float
    ) -> mx.array:
        """Return the attention of the step's first R rows, each over its sequence's tokens up to
        itself: ``[R, query_heads, head_dim]``."""
        return metal_ext.decode_attention(
            order, queries, self.native, 0, layer.native, layer.kv_heads, scale, self._executor
        )

    @abstractmethod
    def _rope(self, rope: metal_ext.RopeTable) -> Any:
        """Return what the backend's kernels take for this rotation."""

    @abstractmethod
    def chunk_attention(
        self, order: mx.array, layer: LayerRegions, queries: mx.array, segment: int, scale: float
    ) -> mx.array:
        """Return the attention of all rows of one segment: ``[count, query_heads, head_dim]``."""

    @abstractmethod
    def region(self, order: mx.array, layer: LayerRegions, kind: str, segment: int) -> mx.array:
        """Return the "keys" or "values" of a segment and of all tokens before it: ``[start + count,
        kv_heads, head_dim]``, valid until the sequence closes."""

    def end(self, arrays: list[mx.array]) -> list[mx.array]:
        """Return the arrays whose evaluation also tells the device that the step is done. arrays:
        the step's results and the newest ordering handle of every layer."""
        return arrays

    def cancel(self) -> None:  # noqa: B027  # a CPU has nothing to cancel
        """Cancel a failed step, whose operations have all ended."""


class PageBackend(Protocol):
    """Memory of a backend: its heaps of blocks, and buffers that map them. Only the engine thread
    may call, except for ``committed_bytes``, and for ``completed_ticket`` while that thread hangs.

    At most one buffer may write a block. Operations on other threads get rising numbers (tickets);
    an operation is done when ``completed_ticket`` has reached its ticket."""

    name: str
    releases: Releases
    charge: Charge
    zeroes_blocks: bool
    """Whether a block holds zeros after it was mapped writable. Only self-tests read this."""
    mapping_limit: int | None
    """The most mappings that all buffers may have, or None without a limit."""
    heap_limit: int | None
    shares_blocks: bool
    maps_while_running: bool
    """Whether mappings may change while steps are in flight. If not, they change only at mapping
    points, from the end of the last step in flight to ``finish_mappings``."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of K and V that ``copy_block`` has copied since the start."""

    def add_heap(self) -> bool:
        """Make the next heap (0, 1, ...); return False if the system refuses."""

    def add_buffer(self) -> bool:
        """Make the next buffer (0, 1, ...); return False if the system refuses."""

    def commit_heap(self, heap: int) -> bool:
        """Give a heap its memory again after a release, so that mappings cannot fail for lack of
        memory. Return False if the system refuses. No effect where mapping allocates memory."""

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        """Map ``count`` blocks of a heap in a buffer. Return False and change nothing if the system
        refuses. Read-only mappings need ``shares_blocks``. Without ``maps_while_running``, mappings
        take effect when ``finish_mappings`` returns."""

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        """Start mapping blocks writable on another thread, memory included; return the ticket. The
        blocks are mapped when the ticket has completed and was not ``refused``. Needs
        ``maps_while_running``."""

    def refused(self, ticket: int) -> bool:
        """Return whether the system refused a completed ``map_ahead``, which then changed nothing.
        May be called once per ticket."""

    def unmap(self, buffer: int, block: int, count: int) -> int:
        """Start unmapping blocks of a buffer; return the operation's ticket."""

    def release(self, heap: int, block: int, count: int) -> int:
        """Start releasing the memory of unmapped blocks to the system; return the ticket."""

    def finish_mappings(self) -> None:
        """Wait for all changes of mappings since the last step, before ``copy_block`` and ``rows``.
        No effect with ``maps_while_running``. Raises BackendFailedError."""

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        """Copy K and V of the first ``tokens`` tokens of a block to a writable block of another
        buffer: after all steps that were started, and before this call returns."""

    def completed_ticket(self) -> int:
        """Return the newest ticket with no earlier one pending. Raises BackendFailedError."""

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait for a ticket; return False if the time passed first."""

    def committed_bytes(self) -> int:
        """Return the bytes that the system charges for all heaps. Any thread may call this."""

    def rows(self, segments: Sequence[Segment]) -> StepRows:
        """Return the rows of a step, which the caller must end or cancel."""

    def shut_down(self) -> bool:
        """Wait for the device and unmap everything; no call may follow. Return False if the device
        did not answer: then the process must end without releasing memory."""


class StateRows:
    """The rows of one step, and the kernel over the recurrent states of their sequences."""

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
        """Advance a recurrent layer's states by all rows; return the layer's next ordering handle
        and the output ``[T, value_heads * value_dim]``.

        number: the index among recurrent layers. qkv: the ``[T, tail_width]`` convolution input; z:
        ``[T, value_heads * value_dim]``; a, b: ``[T, value_heads]``. delta: the weights."""
        offset = self._layout.offsets[number]
        return metal_ext.gated_delta(
            order, qkv, z, a, b, delta, self._native, offset, self._executor
        )


class StateMemory(Protocol):
    """Memory for slots (recurrent states of one sequence at one position) at fixed addresses."""

    @property
    def num_slots(self) -> int: ...

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Return the rows of a step. segments: one per sequence, in the order of the step's rows.
        step: the step's rows in any group of layers; its end also ends the use of the slots."""

    def committed_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes that the system charges for slots; the figure may be slightly old.
        slots: all slots that may hold memory."""

    def release(self, slots: Sequence[int]) -> None:
        """Release the memory of slots, if the system takes it. The slots may be used again."""


def native_geometry(group: Group) -> metal_ext.Geometry:
    return metal_ext.Geometry(
        page_bytes=group.page_bytes,
        tokens_per_block=group.tokens_per_block,
        blocks_per_heap=group.blocks_per_heap,
        blocks_per_range=group.blocks_per_buffer,
        region_row_bytes=[region.row_bytes for region in group.regions],
    )
