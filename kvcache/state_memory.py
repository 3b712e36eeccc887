"""The memory of cells, and what a step does with it: the protocol between sequences' states and the
device's bytes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # who knows of cells need not load these: the doctor loads neither
    import mlx.core as mx

    from kvcache.backend import StepRows
    from metal_ext import GatedDelta


class StateSegment(NamedTuple):
    """What a step does with the states of one sequence: read one cell, and write others."""

    count: int  # type: ignore[assignment]  # not the method of tuples
    """Rows of the sequence in this step."""
    read: int | None
    """The cell of the state before them; None: all zeros."""
    writes: tuple[tuple[int, int], ...]
    """``(rows, cell)``: after so many of them, the state is written there. Rising; the last one is
    after all of them, and may be the cell that was read."""


class StateRows(Protocol):
    """The rows of one step, and the kernels over their states."""

    def recur(
        self,
        token: "mx.array",
        number: int,
        qkv: "mx.array",
        z: "mx.array",
        a: "mx.array",
        b: "mx.array",
        delta: "GatedDelta",
    ) -> "tuple[mx.array, mx.array]":
        """Advance the states of a recurrent layer by all rows; return the layer's next token, and
        what comes out of the states ``[T, value_heads * value_dim]``.

        token: of the layer's newest advance. number: among the recurrent layers. qkv: ``[T,
        tail_width]``, before its convolution; z: ``[T, value_heads * value_dim]``; a, b: ``[T,
        value_heads]``. delta: the layer's weights, as the substrate's kernels have them.
        """


class StateMemory(Protocol):
    """A fixed number of cells at fixed addresses."""

    @property
    def num_cells(self) -> int:
        """Return how many there are."""

    def rows(self, segments: Sequence[StateSegment], step: "StepRows") -> StateRows:
        """Return what a step does with cells. segments: in the order of its rows. step: those rows,
        of any group; cells are in use until its end."""

    def committed_bytes(self, cells: Sequence[int]) -> int:
        """Return what the system charges for these cells; measured a moment ago at most. cells: all
        that may hold memory."""

    def release(self, cells: Sequence[int]) -> None:
        """Release the memory of cells to the system, where it takes that back. They may be written
        again at any time."""
