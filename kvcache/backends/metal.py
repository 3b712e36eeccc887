"""The memory of K and V on a Metal device: sparse, paged or dense buffers.

The mapper's thread makes all mappings. Mappings of sparse buffers change while steps run, and heaps
are released, only if tests of ``kvcache/selftest`` have passed on this machine."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import (
    MAPPING_LIMIT_S,
    BackendFailedError,
    LayerRegions,
    Releases,
    Segment,
    StateRows,
    StepRows,
    native_geometry,
)
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import Act, FaultMemory
from kvcache.backends.posix import NativeMemory
from kvcache.layout import Group, SlotLayout
from kvcache.slots import StateSegment

# Chunks of more than SHORT_CHUNK rows, with heads of WIDE_HEAD numbers, use MLX's fused attention
# kernel. It must be forced, because MLX's default kernel stores all attention scores in memory.
SHORT_CHUNK = 8
WIDE_HEAD = 256
# The number of rows whose scores are in memory together, where they are.
CAPPED_ROWS = 32


class MetalStepRows(StepRows):
    """Runs the GPU's kernels over a step's rows. The constructor begins the step in the backend."""

    def __init__(
        self,
        segments: Sequence[Segment],
        ranges: list[metal_ext.AddressRange],
        kv_backend: "metal_ext.MetalKVBackend",
        *,
        contiguous: bool,
    ) -> None:
        """With ``contiguous``, the K of a layer in one range is one array, and so is the V."""
        super().__init__(kv_backend.rows, kv_backend, segments, ranges)
        self._contiguous = contiguous
        self._masks: dict[tuple[int, int, int | None], mx.array] = {}

    def _rope(self, rope: metal_ext.RopeTable) -> metal_ext.RopeTable:
        return rope

    def chunk_attention(
        self,
        order: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        segment: int,
        softmax: metal_ext.Softmax,
    ) -> mx.array:
        start, (count, _, head_dim) = self._segments[segment].start, queries.shape
        first = 0 if softmax.window is None else max(0, start + 1 - softmax.window)
        keys, values = (
            array.transpose(1, 0, 2)[None] for array in self._past(order, layer, segment, first)
        )
        by_head = queries.transpose(1, 0, 2)[None]
        if softmax.softcap:
            assert softmax.sinks is None, "no family has sinks and a softcap"
            mask = self._mask(first, start, count, softmax.window)
            attended = capped_attention(by_head, keys, values, softmax, mask)
        else:
            hides = softmax.window is not None and start + count > softmax.window
            on_gpu = mx.default_device() == mx.Device(mx.gpu)
            attended = mx.fast.scaled_dot_product_attention(
                by_head,
                keys,
                values,
                scale=softmax.scale,
                mask=self._mask(first, start, count, softmax.window) if hides else "causal",
                sinks=None if softmax.sinks is None else softmax.sinks.astype(queries.dtype),
                force_fused=head_dim == WIDE_HEAD and count > SHORT_CHUNK and on_gpu,
            )
        return attended[0].transpose(1, 0, 2).astype(queries.dtype)

    def _mask(self, first: int, start: int, count: int, window: int | None) -> mx.array:
        """Return which of the tokens from ``first`` on each row sees, ``[count, tokens]``. All
        layers with the same window share it."""
        key = (start, count, window)
        if key not in self._masks:
            places, tokens = (mx.arange(from_, start + count) for from_ in (start, first))
            self._masks[key] = tokens <= places[:, None]
            if window is not None:
                self._masks[key] &= tokens > places[:, None] - window
        return self._masks[key]

    def region(self, order: mx.array, layer: LayerRegions, kind: str, segment: int) -> mx.array:
        keys, values = self._past(order, layer, segment, 0)
        return keys if kind == "keys" else values

    def _past(
        self, order: mx.array, layer: LayerRegions, segment: int, first: int
    ) -> tuple[mx.array, mx.array]:
        """Return the keys and values of a segment and of the tokens before it, from ``first`` on,
        ``[tokens, kv_heads, head_dim]``: copies for paged buffers and for segments of one row, else
        views."""
        rows = self._segments[segment]
        tokens, heads = rows.start + rows.count, (layer.kv_heads, layer.head_dim)
        if not self._contiguous or rows.count == 1:
            where = self.native, segment, first, tokens - first, layer.native
            return metal_ext.gather(order, *where, *heads, self._executor)
        buffer, shape = self._ranges[rows.buffer], (tokens, *heads, layer.dtype)
        keys, values = (
            metal_ext.region_view(order, buffer, region, *shape, self._executor, first)
            for region in (layer.keys, layer.values)
        )
        return keys, values

    def end(self, arrays: list[mx.array]) -> list[mx.array]:
        return [metal_ext.step_end(arrays, self.native, self._executor)]

    def cancel(self) -> None:
        self._executor.abandon(self.native)


def capped_attention(
    queries: mx.array, keys: mx.array, values: mx.array, softmax: metal_ext.Softmax, mask: mx.array
) -> mx.array:
    """Return the attention with a softcap, which MLX's fused kernel lacks, of a few rows at a time,
    since all of their scores are in memory. Arrays are as of MLX's function; ``mask`` is ``[rows,
    tokens]``."""
    _, heads, count, head_dim = queries.shape
    grouped = queries.reshape(1, keys.shape[1], -1, count, head_dim) * softmax.scale
    keys, values = keys[:, :, None].swapaxes(-1, -2), values[:, :, None]
    parts = []
    for row in range(0, count, CAPPED_ROWS):
        here = slice(row, row + CAPPED_ROWS)
        scores = (grouped[:, :, :, here] @ keys).astype(mx.float32)
        scores = softmax.softcap * mx.tanh(scores / softmax.softcap)
        weights = mx.softmax(mx.where(mask[here], scores, -mx.inf), axis=-1)
        parts.append(weights.astype(values.dtype) @ values)
    return mx.concatenate(parts, axis=3).reshape(1, heads, count, head_dim)


class MetalStates:
    """State slots in ordinary Metal buffers. A buffer is made when the first of its slots is used,
    and keeps its memory until the process ends."""

    releases_slots = False

    def __init__(
        self, layout: SlotLayout, num_slots: int, kv_backend: "metal_ext.MetalKVBackend"
    ) -> None:
        self.num_slots = num_slots
        self._layout = layout
        self._kv_backend = kv_backend
        self._bytes = 0
        kv_backend.make_slots(num_slots, layout.slot_bytes)

    def commit(self, slot: int) -> bool:
        try:
            self._bytes = self._kv_backend.commit_slot(slot)
        except OSError:
            return False
        return True

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        assert isinstance(step, MetalStepRows), "slots of a GPU are used by its own steps"
        native = [(s.count, s.read, list(s.writes)) for s in segments]
        rows = self._kv_backend.state_rows(step.native, native)
        return StateRows(self._layout, rows, self._kv_backend)

    def write_record(self, slot: int, fd: int, offset: int) -> int:
        return self._kv_backend.write_slot(slot, fd, offset)

    def read_record(self, slot: int, fd: int, offset: int) -> int:
        return self._kv_backend.read_slot(slot, fd, offset)

    def committed_bytes(self, slots: Sequence[int]) -> int:
        return self._bytes

    def release(self, slots: Sequence[int]) -> None: ...


log = logging.getLogger(__name__)


class MetalBackend(NativeMemory):
    """Heaps and address ranges of a Metal backend. Only the mapper thread changes mappings."""

    zeroes_blocks = True
    mapping_limit: int | None = None
    heap_limit: int | None = None

    def __init__(
        self,
        kind: str,
        group: Group,
        *,
        max_buffers: int,
        release_heaps: bool,
        maps_while_running: bool = False,
        residency_keep_s: float = 0.0,
        weights: Sequence[mx.array] = (),
    ) -> None:
        """``kind`` is "sparse", "paged" or "dense". ``max_buffers`` is the most buffers.
        ``new_backends`` explains the others. Raises RuntimeError if the device lacks a feature,
        OSError if memory is refused."""
        self._kv_backend = metal_ext.MetalKVBackend(
            kind,
            native_geometry(group),
            max_buffers,
            timeout_s=MAPPING_LIMIT_S,
            residency_keep_s=residency_keep_s,
            maps_beside_steps=maps_while_running,
        )
        self._kv_backend.hold(list(weights))
        super().__init__(self._kv_backend.new_heap, self._kv_backend.new_range)
        is_dense = kind == "dense"
        self.name = kind
        kept = Releases.ARENA if is_dense else Releases.NOTHING
        self.releases = Releases.IDLE if release_heaps and not is_dense else kept
        self.shares_blocks = not is_dense
        self.maps_while_running = maps_while_running or kind != "sparse"
        self._arena_bytes = max_buffers * group.heap_bytes if is_dense else None
        self._contiguous = kind != "paged"
        self._newest_ticket = 0
        self._finished_ticket = 0
        """The ticket of the newest operation for which ``finish_mappings`` has waited."""
        self._begun: list[int] = []
        """The tickets of the mappings queued since the last ``finish_mappings``."""
        self._released: set[int] = set()
        """The numbers of released heaps, which may have no memory."""
        self._faults = FaultMemory(KVBackend((kind, True)))
        self._survived: set[Act] = set()

    @property
    def late_signals(self) -> int:
        return self._kv_backend.late_signals

    @property
    def command_buffers(self) -> int:
        return self._kv_backend.command_buffers

    def commit_heap(self, heap: int) -> bool:
        if heap not in self._released:
            return True
        # The mapper runs operations in order, so that the heap is released before it is committed.
        ticket = self._queued(self._kv_backend.commit_heap(self._mapper, self._heaps[heap]))
        self._finish(ticket, "making a heap")
        if self.refused(ticket):
            return False
        self._released.remove(heap)
        return True

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        assert self.maps_while_running or heap not in self._released, "a heap without memory"
        ticket = self._map_queued(buffer, block, heap, heap_block, count, writable=writable)
        if not self.maps_while_running:
            self._begun.append(ticket)
            return True
        self._finish(ticket, "mapping")
        return not self.refused(ticket)

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        assert self.maps_while_running, "nothing is mapped while steps run"
        return self._map_queued(buffer, block, heap, heap_block, count, writable=True)

    def unmap(self, buffer: int, block: int, count: int) -> int:
        return self._guarded(Act.UNMAP, partial(super().unmap, buffer, block, count))

    def release(self, heap: int, block: int, count: int) -> int:
        assert not self.releases.keeps_heaps, "heaps are kept on this machine"
        self._released.add(heap)
        return self._guarded(Act.RELEASE, partial(super().release, heap, block, count))

    def finish_mappings(self) -> None:
        if self.maps_while_running or self._finished_ticket == self._newest_ticket:
            return
        self._finish_point("mapping")
        self._finished_ticket = self._newest_ticket
        begun, self._begun = self._begun, []
        if [ticket for ticket in begun if self.refused(ticket)]:
            raise BackendFailedError("the system refuses to map a heap that has its memory")

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        blocks = self._ranges[source], source_block, self._ranges[target], target_block
        ticket = self._kv_backend.copy_block(self._mapper, *blocks, tokens, self._copies)
        self._finish(self._queued(ticket), "copying a block")

    def completed_ticket(self) -> int:
        failure = self._mapper.failure or self._kv_backend.failure
        if failure:
            raise BackendFailedError(f"the Metal backend failed: {failure}")
        return self._mapper.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        done = self._mapper.wait(ticket, timeout_s)
        self.completed_ticket()  # raises an error after a failure
        return done

    def committed_bytes(self) -> int:
        return super().committed_bytes() if self._arena_bytes is None else self._arena_bytes

    def rows(self, segments: Sequence[Segment]) -> MetalStepRows:
        return MetalStepRows(segments, self._ranges, self._kv_backend, contiguous=self._contiguous)

    def new_states(self, layout: SlotLayout, num_slots: int) -> MetalStates:
        """Make all state slots, once, before the first step. Raises RuntimeError."""
        return MetalStates(layout, num_slots, self._kv_backend)

    def shut_down(self) -> bool:
        try:
            mx.synchronize()
        except RuntimeError:
            log.exception("the GPU failed before its end")
            return False
        mapped = self._mapper.wait(self._newest_ticket, MAPPING_LIMIT_S)
        return mapped and self._kv_backend.shutdown()

    def _map_queued(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, *, writable: bool
    ) -> int:
        blocks = (buffer, block, heap, heap_block, count)
        return self._guarded(Act.MAP, partial(super()._map_queued, *blocks, writable=writable))

    def _guarded(self, act: Act, queue: Callable[[], int]) -> int:
        """Queue an operation and return its ticket. Wait for the first operation of each kind, so
        that an intent file names the act if the machine crashes."""
        if act in self._survived:
            return self._queued(queue())
        with self._faults.intent(act):
            ticket = self._queued(queue())
            self._finish(ticket, act)
            self._finish_point(act)
        self._survived.add(act)
        return ticket

    def _queued(self, ticket: int) -> int:
        self._newest_ticket = ticket
        return ticket

    def _finish_point(self, what: str) -> None:
        if not self.maps_while_running:
            self._finish(self._queued(self._kv_backend.finish_mappings(self._mapper)), what)

    def _finish(self, ticket: int, what: str) -> None:
        if not self.wait(ticket, MAPPING_LIMIT_S):
            raise BackendFailedError(f"{what} took over {MAPPING_LIMIT_S:.0f} s")
