"""Cells in buffers of a Metal device, and the GPU's kernels over them."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backend import StepRows
from kvcache.layout import CellLayout
from kvcache.metal_step_rows import MetalStepRows
from kvcache.state_memory import StateRows, StateSegment
from metal_ext import GatedDelta


class MetalStates:
    """Cells in ordinary buffers, all of whose memory is there from the start until the end."""

    def __init__(
        self, layout: CellLayout, num_cells: int, substrate: "metal_ext.MetalSubstrate"
    ) -> None:
        """Raises RuntimeError where a buffer cannot hold them, OSError where the device refuses."""
        self.num_cells = num_cells
        self._layout = layout
        self._substrate = substrate
        self._bytes = num_cells * layout.cell_bytes
        substrate.make_cells(num_cells, layout.cell_bytes)

    def rows(self, segments: Sequence[StateSegment], step: StepRows) -> StateRows:
        """Return what a step does with cells. step: its rows in the substrate that has the cells,
        so that they are in use until its epoch has completed."""
        assert isinstance(step, MetalStepRows), "cells of a GPU are used by its own steps"
        native = [(its.count, its.read, list(its.writes)) for its in segments]
        rows = self._substrate.state_rows(step.native, native)
        return MetalStateRows(self._layout, rows, self._substrate)

    def committed_bytes(self, cells: Sequence[int]) -> int:
        """Return the bytes of all cells, whichever may have been written."""
        return self._bytes

    def release(self, cells: Sequence[int]) -> None:
        """Release nothing: a buffer's memory goes back with the buffer, and the buffers stay."""


class MetalStateRows:
    """The rows of one step."""

    def __init__(
        self,
        layout: CellLayout,
        rows: "metal_ext.MetalStateRows",
        substrate: "metal_ext.MetalSubstrate",
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._substrate = substrate

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
        return metal_ext.gated_delta(
            token, qkv, z, a, b, delta, self._rows, offset, self._substrate
        )
