"""Cells in memory of the system, and the CPU's kernel over them."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

import metal_ext
from kvcache.backend import StepRows
from kvcache.layout import CellLayout
from kvcache.state_memory import StateRows, StateSegment
from metal_ext import GatedDelta

# Asking the system takes half a millisecond for a gigabyte, so it is asked no more often.
MEASURED_EVERY_S = 0.5


class NativeStates:
    """Cells one behind the other, at an address that never changes. The system gives each its
    memory when it is written first."""

    def __init__(
        self,
        layout: CellLayout,
        num_cells: int,
        workers: metal_ext.CpuWorkers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError where the system has no addresses for so many."""
        self.num_cells = num_cells
        self._layout = layout
        self._workers = workers
        self._memory = metal_ext.StateMemory(num_cells * layout.cell_bytes)
        self._clock = clock
        self._committed_bytes = 0
        self._measured_at = float("-inf")

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Return what a step does with cells. step: MLX's stream keeps its order on a CPU."""
        native = [
            (
                segment.count,
                0 if segment.read is None else self._address(segment.read),
                [(rows, self._address(cell)) for rows, cell in segment.writes],
            )
            for segment in segments
        ]
        return NativeStateRows(
            self._layout, metal_ext.StateRows(native, [self._memory]), self._workers
        )

    def committed_bytes(self, cells: Sequence[int]) -> int:
        """Return how much of these cells is in memory."""
        if (now := self._clock()) - self._measured_at >= MEASURED_EVERY_S:
            self._measured_at, size = now, self._layout.cell_bytes
            parts = (self._memory.committed(cell * size, size) for cell in cells)
            self._committed_bytes = sum(parts)
        return self._committed_bytes

    def release(self, cells: Sequence[int]) -> None:
        """Release the memory of cells: they hold zeros until they are written again."""
        size = self._layout.cell_bytes
        for cell in cells:
            self._memory.release(cell * size, size)
            self._measured_at = float("-inf")

    def _address(self, cell: int) -> int:
        return self._memory.address + cell * self._layout.cell_bytes


class NativeStateRows:
    """The rows of one step."""

    def __init__(
        self, layout: CellLayout, rows: metal_ext.StateRows, workers: metal_ext.CpuWorkers
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._workers = workers

    def recur(
        self,
        token: mx.array,
        number: int,
        qkv: mx.array,
        z: mx.array,
        a: mx.array,
        b: mx.array,
        delta: GatedDelta,
    ) -> tuple[mx.array, mx.array]:
        """Advance the states of a recurrent layer by all rows: see StateRows."""
        offset = self._layout.offsets[number]
        return metal_ext.gated_delta(token, qkv, z, a, b, delta, self._rows, offset, self._workers)
