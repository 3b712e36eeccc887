"""A Metal build of the extension, in plain Python, that knows what a paging mistake is.

Blocks are arrays, operations compute at once with MLX's CPU operations, and tickets complete when
they are issued, unless ``Device`` says otherwise. What a real device would answer with a panic or
with wrong bytes is a MistakeError here.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from engine.models.mlx_ops import GATED
from engine.models.spec import Gate
from metal_ext import CpuWorkers, GatedDelta, StateMemory, StateRows, gated_delta
from tests.kvcache.blocks import read_image, write_image

NO_MEMORY = OSError(errno.ENOMEM, "the device refuses")


class MistakeError(AssertionError):
    """A use of memory that a device would not forgive."""


@dataclass
class Device:
    """The manners of the device, and everything that was made on it."""

    said: dict[str, Any] = field(
        default_factory=lambda: {
            "name": "Double",
            "families": ["apple9", "metal3", "metal4"],
            "max_buffer_bytes": 1 << 30,
            "recommended_working_set_bytes": 1 << 32,
            "unified_memory": True,
            "residency_sets": True,
            "missing_for_sparse": [],
            "missing_for_paged": [],
            "missing_for_dense": [],
        }
    )
    refuses: bool = False
    """Heaps, ranges and mappings."""
    silent: bool = False
    """Nothing completes any more."""
    failure: str = ""
    mapper_failure: str = ""
    kv_backends: list["KVBackend"] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """The operations of kernels."""


@dataclass(frozen=True)
class RopeTable:
    frequencies: list[float]
    magnitude: float = 1.0


@dataclass(frozen=True)
class StoredMatrix:
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.bits not in (0, 4, 8):
            raise ValueError(f"no Metal kernel multiplies this: codes of {self.bits} bits")

    @property
    def dtype(self) -> mx.Dtype | None:
        numbers = self.weight if self.scales is None else self.scales
        return None if numbers.dtype == mx.uint8 else numbers.dtype

    def of(self, expert: int) -> "StoredMatrix":
        def own(part: mx.array | None) -> mx.array | None:
            return None if part is None else part[expert]

        scales, biases, bias = map(own, (self.scales, self.biases, self.bias))
        return replace(self, weight=self.weight[expert], scales=scales, biases=biases, bias=bias)

    def product(self, x: mx.array) -> mx.array:
        """Row by row: other rows change no bits."""
        rows = mx.split(x, len(x))
        if self.scales is None:
            made = [row @ self.weight.T for row in rows]
        else:
            how: tuple[Any, ...] = (True, self.group_size, self.bits, self.mode)
            parts = (self.weight, self.scales, self.biases)
            made = [mx.quantized_matmul(row, *parts, *how) for row in rows]
        return mx.concatenate(made) + (0 if self.bias is None else self.bias)


@dataclass(frozen=True)
class Mixture:
    gate_up: list[StoredMatrix]
    down: StoredMatrix
    shared: list[StoredMatrix]
    chosen: int
    normalised: bool
    kind: str = "silu"

    def __post_init__(self) -> None:
        widths = {(each.bits, each.weight.shape[-1]) for each in (*self.gate_up, *self.shared[:2])}
        if len(widths) > 1 or any(each.bits != self.down.bits for each in self.shared[2:]):
            raise ValueError("no Metal kernel computes this mixture")

    dtype = property(lambda self: self.down.dtype)
    has_shared = property(lambda self: bool(self.shared))


class Heap:
    def __init__(self, geometry: "Geometry") -> None:
        self.geometry = geometry
        self.blocks: list[list[np.ndarray]] | None = None
        self.commit()
        self.places: dict[int, list[tuple[Range, int]]] = {}
        """Where each block is mapped."""
        self.written: dict[int, int] = {}
        """By block, the epoch that wrote it last."""
        self.sealed: set[int] = set()

    def commit(self) -> None:
        size = self.geometry.tokens_per_block
        self.blocks = [
            [np.full((size, row), 0xFF, np.uint8) for row in self.geometry.region_row_bytes]
            for _ in range(self.geometry.blocks_per_heap)
        ]

    @property
    def committed_bytes(self) -> int:
        return 0 if self.blocks is None else self.geometry.heap_bytes


@dataclass(frozen=True)
class Geometry:
    """The arguments of native_geometry."""

    page_bytes: int
    tokens_per_block: int
    blocks_per_heap: int
    blocks_per_range: int
    region_row_bytes: list[int]
    ring_blocks: int

    @property
    def heap_bytes(self) -> int:
        return sum(self.region_row_bytes) * self.tokens_per_block * self.blocks_per_heap


@dataclass
class Range:
    mapped: dict[int, tuple[Heap, int, bool]] = field(default_factory=dict)
    """By block: heap, block of the heap, writable."""
    begun: set[int] = field(default_factory=set)
    """Blocks whose mapping is not finished."""

    def write_block(self, block: int, fd: int, offset: int) -> int:
        record = b"".join(region.tobytes() for region in self._regions(block))
        return write_image(fd, offset, record, len(record))

    def read_block(self, block: int, fd: int, offset: int) -> int:
        regions = self._regions(block)
        if not self.mapped[block][2]:
            raise RuntimeError(f"block {block} is read-only")
        record = read_image(fd, offset, sum(region.nbytes for region in regions))
        at = 0
        for region in regions:
            part = np.frombuffer(record, np.uint8, region.nbytes, at)
            region[:] = part.reshape(region.shape)
            at += region.nbytes
        return crc32(record)

    def _regions(self, block: int) -> list[np.ndarray]:
        if block not in self.mapped or block in self.begun:
            raise RuntimeError(f"block {block} is not mapped")
        heap, place, _ = self.mapped[block]
        assert heap.blocks is not None
        return heap.blocks[place]

    def rows(self, region: int, tokens: int, size: int) -> np.ndarray:
        """``[tokens, row bytes]``: NaN where nothing is mapped."""
        parts = []
        for block in reversed(range(-(-tokens // size))):
            if block in self.mapped:
                heap, place, _ = self.mapped[block]
                assert heap.blocks is not None
                parts.append(heap.blocks[place][region])
            else:
                parts.append(np.full_like(parts[0], 0xFF))
        return np.concatenate(parts[::-1])[:tokens]


@dataclass(frozen=True)
class Layer:
    key_region: int
    value_region: int
    dtype: mx.Dtype


@dataclass
class Rows:
    segments: list[tuple[Range, int, int]]
    epoch: int
    closed: bool = False

    def places(self) -> list[tuple[Range, int]]:
        return [
            (its, position)
            for its, start, count in self.segments
            for position in range(start, start + count)
        ]


@dataclass
class Slots:
    """Slots of a CPU, whose kernel advances them in float32, with twice the room."""

    count: int
    slot_bytes: int
    made: set[int] = field(default_factory=set)
    """Slots with memory."""
    memory: StateMemory = field(init=False)
    workers: CpuWorkers = field(init=False)

    def __post_init__(self) -> None:
        self.memory = StateMemory(2 * self.count * self.slot_bytes)
        self.workers = CpuWorkers(1)

    def address(self, slot: int) -> int:
        if not 0 <= slot < self.count:
            raise MistakeError(f"slot {slot} of {self.count}")
        if slot not in self.made:
            raise MistakeError(f"slot {slot} has no memory")
        return self.memory.address + 2 * slot * self.slot_bytes


@dataclass(frozen=True)
class SlotRows:
    rows: Rows
    native: StateRows


class Mapper:
    """The one that the backend makes; ``Double`` gives it its device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._issued = 0
        self._refused: set[int] = set()

    def map(
        self, its: Range, heap: Heap, heap_block: int, block: int, count: int, writable: bool
    ) -> int:
        ticket = self.next_ticket()
        if self._device.refuses:
            self._refused.add(ticket)
            return ticket
        backend = self._device.kv_backends[-1]
        backend.check_point("mapped")
        if heap.blocks is None:
            heap.commit()
        assert heap.blocks is not None
        if not backend.maps_beside_steps:
            its.begun.update(range(block, block + count))
        for i in range(count):
            place = heap.places.setdefault(heap_block + i, [])
            if block + i in its.mapped:
                raise MistakeError(f"block {block + i} is mapped twice")
            if writable:
                if place:
                    raise MistakeError("a block becomes writable while it is mapped")
                heap.sealed.discard(heap_block + i)
                for array in heap.blocks[heap_block + i]:
                    array[:] = 0
            else:
                if heap.written.get(heap_block + i, 0) > backend.completed_epoch:
                    raise MistakeError("a block is shared before its writer has completed")
                heap.sealed.add(heap_block + i)
            place.append((its, block + i))
            its.mapped[block + i] = (heap, heap_block + i, writable)
        if 0 < heap.geometry.ring_blocks < len(its.mapped):
            raise MistakeError("blocks of a ring lie over one another")
        return ticket

    def unmap(self, its: Range, block: int, count: int) -> int:
        backend = self._device.kv_backends[-1]
        if backend.open_epochs:
            raise MistakeError("unmapped while a step may use it")
        its.begun.difference_update(range(block, block + count))
        for number in range(block, block + count):
            heap, place, _ = its.mapped.pop(number)
            heap.places[place].remove((its, number))
        return self.next_ticket()

    def release(self, heap: Heap, block: int, count: int) -> int:
        if count != heap.geometry.blocks_per_heap or any(heap.places.values()):
            raise MistakeError("a heap is released while it is mapped, or in part")
        self._device.kv_backends[-1].check_point("released")
        heap.blocks = None
        return self.next_ticket()

    def commit(self, heap: Heap) -> int:
        ticket = self.next_ticket()
        if self._device.refuses:
            self._refused.add(ticket)
        elif heap.blocks is None:
            heap.commit()
        return ticket

    def next_ticket(self) -> int:
        self._issued += 1
        return self._issued

    def refused(self, ticket: int) -> bool:
        if ticket in self._refused:
            self._refused.remove(ticket)
            return True
        return False

    @property
    def completed(self) -> int:
        return 0 if self._device.silent else self._issued

    @property
    def failure(self) -> str:
        return self._device.mapper_failure

    def wait(self, ticket: int, timeout_s: float) -> bool:
        return ticket <= self.completed


class KVBackend:
    def __init__(
        self,
        device: Device,
        kind: str,
        geometry: Geometry,
        max_ranges: int,
        timeout_s: float,
        residency_keep_s: float,
        maps_beside_steps: bool,
    ) -> None:
        self.kind, self.geometry, self.max_ranges = kind, geometry, max_ranges
        self.timeout_s, self.residency_keep_s = timeout_s, residency_keep_s
        self.maps_beside_steps = maps_beside_steps or kind != "sparse"
        self.finished = 0
        """How often mappings were finished."""
        self.command_buffers = 0
        self.held: list[mx.array] = []
        self.ranges: list[Range] = []
        self.heaps: list[Heap] = []
        self.slots: Slots | None = None
        self.open_epochs: set[int] = set()
        self.completed_epoch = 0
        self.late_signals = 0
        self.ended = False
        self._device = device
        device.kv_backends.append(self)

    @property
    def failure(self) -> str:
        return self._device.failure

    def hold(self, arrays: list[mx.array]) -> None:
        self.held += arrays

    def make_slots(self, count: int, slot_bytes: int) -> None:
        if self.slots is not None or self.completed_epoch or self.open_epochs:
            raise MistakeError("slots are made once, before the first step")
        self.slots = Slots(count, slot_bytes)

    def commit_slot(self, slot: int) -> int:
        assert self.slots is not None
        if self._device.refuses and slot not in self.slots.made:
            raise NO_MEMORY
        self.slots.made.add(slot)
        return len(self.slots.made) * self.slots.slot_bytes

    def write_slot(self, slot: int, fd: int, offset: int) -> int:
        """With twice the room in the file, too."""
        assert self.slots is not None
        at = self.slots.address(slot) - self.slots.memory.address
        return self.slots.memory.write_record(at, 2 * self.slots.slot_bytes, fd, offset)

    def read_slot(self, slot: int, fd: int, offset: int) -> int:
        assert self.slots is not None
        at = self.slots.address(slot) - self.slots.memory.address
        return self.slots.memory.read_record(at, 2 * self.slots.slot_bytes, fd, offset)

    def state_rows(
        self, rows: Rows, segments: list[tuple[int, int | None, list[tuple[int, int]]]]
    ) -> SlotRows:
        if rows.closed:
            raise MistakeError("states of a step that has ended")
        assert self.slots is not None
        at = self.slots.address
        native = [
            (count, 0 if read is None else at(read), [(n, at(slot)) for n, slot in writes])
            for count, read, writes in segments
        ]
        return SlotRows(rows, StateRows(native, [self.slots.memory]))

    def new_heap(self) -> Heap:
        if self._device.refuses:
            raise NO_MEMORY
        self.heaps.append(Heap(self.geometry))
        return self.heaps[-1]

    def new_range(self) -> Range:
        if self._device.refuses or len(self.ranges) == self.max_ranges:
            raise NO_MEMORY
        self.ranges.append(Range())
        return self.ranges[-1]

    def check_point(self, what: str) -> None:
        if not self.maps_beside_steps and self.open_epochs:
            raise MistakeError(f"{what} while a step is in flight")

    def finish_mappings(self, mapper: Mapper) -> int:
        self.finished += 1
        for its in self.ranges:
            its.begun.clear()
        return mapper.next_ticket()

    def commit_heap(self, mapper: Mapper, heap: Heap) -> int:
        return mapper.commit(heap)

    def rows(self, segments: list[tuple[Range, int, int]]) -> Rows:
        if self.ended:
            raise MistakeError("used after its end")
        if any(its.begun for its in self.ranges):
            raise MistakeError("a step begins before mappings are finished")
        size = self.geometry.tokens_per_block
        for its, start, count in segments:
            for block in range(start // size, -(-(start + count) // size)):
                if block not in its.mapped:
                    raise IndexError("a segment of rows without memory")
                if not its.mapped[block][2]:
                    raise RuntimeError("a step would write a sealed block")
        epoch = self.completed_epoch + len(self.open_epochs) + 1
        self.open_epochs.add(epoch)
        return Rows(segments, epoch)

    def close(self, rows: Rows) -> None:
        rows.closed = True
        self.open_epochs.discard(rows.epoch)
        self.completed_epoch = max(self.completed_epoch, rows.epoch)
        self.command_buffers += 1

    def abandon(self, rows: Rows) -> None:
        self._device.calls.append("abandon")
        self.close(rows)

    def copy_block(
        self,
        mapper: Mapper,
        source: Range,
        source_block: int,
        target: Range,
        target_block: int,
        tokens: int,
        counter: "CopyCounter",
    ) -> int:
        if source.begun or target.begun:
            raise MistakeError("copied before mappings are finished")
        from_heap, from_place, _ = source.mapped[source_block]
        to_heap, to_place, writable = target.mapped[target_block]
        if not writable:
            raise IndexError("the target is read-only")
        assert from_heap.blocks is not None
        assert to_heap.blocks is not None
        for region, array in enumerate(from_heap.blocks[from_place]):
            to_heap.blocks[to_place][region][:tokens] = array[:tokens]
            counter.bytes += array[:tokens].nbytes
        return mapper.next_ticket()

    def shutdown(self) -> bool:
        self.ended = True
        return not self._device.silent and not self.open_epochs


@dataclass
class CopyCounter:
    bytes: int = 0


# --- the operations -------------------------------------------------------------------------------


class Operations:
    """The operations of kernels, and the classes, by their names in the extension."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def make_mapper(self) -> Mapper:
        return Mapper(self.device)

    def make_kv_backend(
        self,
        kind: str,
        geometry: Geometry,
        max_ranges: int,
        timeout_s: float = 30.0,
        residency_keep_s: float = 0.0,
        maps_beside_steps: bool = False,
    ) -> KVBackend:
        missing = self.device.said[f"missing_for_{kind}"]
        if missing:
            raise RuntimeError("; ".join(missing))
        return KVBackend(
            self.device, kind, geometry, max_ranges, timeout_s, residency_keep_s, maps_beside_steps
        )

    def capabilities(self) -> dict[str, Any]:
        return self.device.said

    def append(
        self,
        token: mx.array,
        keys: mx.array,
        values: mx.array,
        rows: Rows,
        layer: Layer,
        backend: KVBackend,
    ) -> mx.array:
        self.device.calls.append("append")
        self._write(rows, layer, keys, values, backend)
        return mx.zeros((1,))

    def project_append(
        self,
        token: mx.array,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        norms: tuple[mx.array, mx.array, float] | None,
        rope: RopeTable | None,
        rows: Rows,
        layer: Layer,
        backend: KVBackend,
    ) -> tuple[mx.array, mx.array]:
        self.device.calls.append("project_append")
        assert queries.dtype == keys.dtype == values.dtype
        positions = mx.array([position for _, position in rows.places()])

        weights, eps = (None, 0.0) if norms is None else (norms[:2], norms[2])

        def changed(x: mx.array, which: int) -> mx.array:
            wide = x.astype(mx.float32)
            if weights is not None:
                assert weights[which].dtype == mx.float32
                wide = mx.fast.rms_norm(wide, weights[which], eps)
            if rope is not None:
                turning = 2 * len(rope.frequencies)
                turned = mx.fast.rope(
                    wide[..., None, :turning],
                    turning,
                    traditional=False,
                    base=None,
                    scale=1.0,
                    offset=positions,
                    freqs=1.0 / mx.array(rope.frequencies),
                ).squeeze(2)
                wide = mx.concatenate([rope.magnitude * turned, wide[..., turning:]], axis=-1)
            return wide.astype(x.dtype)

        self._write(rows, layer, changed(keys, 1), values, backend)
        return mx.zeros((1,)), changed(queries, 0)

    def decode_attention(
        self,
        token: mx.array,
        queries: mx.array,
        rows: Rows,
        first_row: int,
        layer: Layer,
        kv_heads: int,
        softmax: metal_ext.Softmax,
        backend: KVBackend,
    ) -> mx.array:
        self.device.calls.append("decode_attention")
        out = []
        for row, (its, position) in enumerate(rows.places()[first_row:][: len(queries)]):
            tokens, head_dim = position + 1, queries.shape[-1]
            first = max(0, tokens - (softmax.window or tokens))
            keys, values = (
                self._read(its, region, tokens, kv_heads, head_dim, layer, backend)[first:]
                .transpose(1, 0, 2)
                .astype(mx.float32)
                for region in (layer.key_region, layer.value_region)
            )
            attended = attention(queries[row].astype(mx.float32), keys, values, softmax)
            out.append(attended.astype(queries.dtype))
        return mx.stack(out)

    def region_view(
        self,
        token: mx.array,
        its: Range,
        region: int,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        backend: KVBackend,
        first: int = 0,
    ) -> mx.array:
        if backend.kind == "paged":
            raise ValueError("rows of a paged range lie in no one array")
        self.device.calls.append("region_view")
        layer = Layer(region, region, dtype)
        return self._read(its, region, tokens, kv_heads, head_dim, layer, backend)[first:]

    def gather(
        self,
        token: mx.array,
        rows: Rows,
        segment: int,
        first: int,
        tokens: int,
        layer: Layer,
        kv_heads: int,
        head_dim: int,
        backend: KVBackend,
    ) -> tuple[mx.array, mx.array]:
        self.device.calls.append("gather")
        its = rows.segments[segment][0]
        keys, values = (
            self._read(its, region, first + tokens, kv_heads, head_dim, layer, backend)[first:]
            for region in (layer.key_region, layer.value_region)
        )
        return keys, values

    def gated_delta(
        self,
        token: mx.array,
        qkv: mx.array,
        z: mx.array,
        a: mx.array,
        b: mx.array,
        delta: GatedDelta,
        rows: SlotRows,
        offset: int,
        backend: KVBackend,
    ) -> tuple[mx.array, mx.array]:
        self.device.calls.append("gated_delta")
        if rows.rows.closed:
            raise MistakeError("a state is advanced behind the end of its step")
        assert backend.slots is not None
        dtype, workers = z.dtype, backend.slots.workers
        qkv, z, a, b = (x.astype(mx.float32) for x in (qkv, z, a, b))
        token, made = gated_delta(token, qkv, z, a, b, delta, rows.native, 2 * offset, workers)
        return token, made.astype(dtype)

    def multiply(
        self, x: mx.array, matrices: list[StoredMatrix], residual: mx.array | None = None
    ) -> list[mx.array]:
        self.device.calls.append("multiply")
        assert len(matrices) == 1 or residual is None
        return [each.product(x) + (0 if residual is None else residual) for each in matrices]

    def multiply_gated(
        self, x: mx.array, gate: StoredMatrix, up: StoredMatrix, *, kind: str = "silu"
    ) -> mx.array:
        self.device.calls.append("multiply_gated")
        return GATED[Gate(kind)](gate.product(x), up.product(x))

    def mixture(
        self,
        x: mx.array,
        residual: mx.array,
        logits: mx.array,
        mixture: Mixture,
        shared_gate: mx.array | None = None,
    ) -> mx.array:
        self.device.calls.append("mixture")
        assert (shared_gate is not None) == mixture.has_shared
        shares = mx.softmax(logits, axis=-1, precise=True)

        def mlp(row: mx.array, *matrices: StoredMatrix) -> mx.array:
            both = mx.concatenate([each.product(row) for each in matrices[:-1]], axis=-1)
            gated = GATED[Gate(mixture.kind)](*mx.split(both, 2, axis=-1))
            return matrices[-1].product(gated)

        rows = []
        for number in range(len(x)):
            row = mx.zeros(x[:1].shape)
            best = mx.argsort(-shares[number])[: mixture.chosen]
            weights = shares[number][best]
            weights = weights / weights.sum() if mixture.normalised else weights
            for expert, weight in zip(np.array(best), weights, strict=True):
                stacks = [its.of(int(expert)) for its in (*mixture.gate_up, mixture.down)]
                row = row + weight * mlp(x[number : number + 1], *stacks)
            rows.append(row)
        mixed = mx.concatenate(rows)
        if shared_gate is not None:
            mixed = mixed + mx.sigmoid(shared_gate) * mlp(x, *mixture.shared)
        return residual + mixed

    def step_end(self, arrays: list[mx.array], rows: Rows, backend: KVBackend) -> mx.array:
        if rows.closed:
            raise RuntimeError("the rows' epoch has been closed already")
        mx.eval(arrays)
        backend.close(rows)
        return mx.zeros((1,))

    def _write(
        self, rows: Rows, layer: Layer, keys: mx.array, values: mx.array, backend: KVBackend
    ) -> None:
        size = backend.geometry.tokens_per_block
        for array, region in ((keys, layer.key_region), (values, layer.value_region)):
            kept = np.array(array.astype(layer.dtype).view(mx.uint8)).reshape(len(array), -1)
            for row, (its, position) in enumerate(rows.places()):
                heap, place, _ = its.mapped[position // size]
                if place in heap.sealed:
                    raise MistakeError("a sealed block is written")
                assert heap.blocks is not None
                heap.blocks[place][region][position % size] = kept[row]
                heap.written[place] = rows.epoch

    @staticmethod
    def _read(
        its: Range,
        region: int,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        layer: Layer,
        backend: KVBackend,
    ) -> mx.array:
        rows = its.rows(region, tokens, backend.geometry.tokens_per_block)
        return mx.array(rows).view(layer.dtype).reshape(tokens, kv_heads, head_dim)


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes ``metal_ext`` a Metal build for one test."""
    device = Device()
    operations = Operations(device)
    names: dict[str, Callable[..., Any] | Any] = {
        "HAS_METAL": True,
        "Geometry": Geometry,
        "Layer": Layer,
        "RopeTable": RopeTable,
        "Mapper": operations.make_mapper,
        "CopyCounter": CopyCounter,
        "MetalKVBackend": operations.make_kv_backend,
        "metal_capabilities": operations.capabilities,
        "append": operations.append,
        "project_append": operations.project_append,
        "decode_attention": operations.decode_attention,
        "region_view": operations.region_view,
        "gather": operations.gather,
        "gated_delta": operations.gated_delta,
        "Mixture": Mixture,
        "StoredMatrix": StoredMatrix,
        "mixture": operations.mixture,
        "multiply": operations.multiply,
        "multiply_gated": operations.multiply_gated,
        "step_end": operations.step_end,
    }
    for name, value in names.items():
        monkeypatch.setattr(metal_ext, name, value, raising=False)
    return device


def attention(
    query: mx.array, keys: mx.array, values: mx.array, softmax: metal_ext.Softmax
) -> mx.array:
    """Of one row ``[heads, head_dim]`` over keys and values ``[kv_heads, tokens, head_dim]``."""
    first = max(0, keys.shape[1] - (softmax.window or keys.shape[1]))
    keys, values = (
        mx.repeat(its[:, first:], len(query) // len(its), axis=0) for its in (keys, values)
    )
    scores = softmax.scale * (query[:, None] @ keys.swapaxes(1, 2))
    if softmax.softcap:
        scores = softmax.softcap * mx.tanh(scores / softmax.softcap)
    if softmax.sinks is not None:
        scores = mx.concatenate([scores, softmax.sinks[:, None, None]], axis=-1)
    return (mx.softmax(scores, axis=-1)[..., : keys.shape[1]] @ values)[:, 0]
