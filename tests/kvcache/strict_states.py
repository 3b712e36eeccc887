"""Cells that hold numbers instead of states, and find every use that a device would not forgive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcache.state_memory import StateSegment
from tests.kvcache.blocks import MistakeError

NOTHING = (0, 0)
"""No tokens, and what a state is before the first."""


class _Use(NamedTuple):
    life: int
    epoch: int
    writes: bool


@dataclass(slots=True)
class StrictStates:
    """A cell holds how many tokens its state has seen, and what came of them."""

    num_cells: int
    cell_bytes: int = 16384
    completed_epoch: int = 0
    released: int = 0
    contents: dict[int, tuple[int, int]] = field(default_factory=dict)
    _uses: dict[int, list[_Use]] = field(default_factory=dict)

    def rows(self, segments: Sequence[StateSegment], step: object) -> Any:
        """The segments themselves: who plays the device goes through them."""
        return segments

    def committed_bytes(self, cells: Sequence[int]) -> int:
        if missing := self.contents.keys() - set(cells):
            raise MistakeError(f"nobody knows that cells {missing} hold memory")
        return len(self.contents) * self.cell_bytes

    def release(self, cells: Sequence[int]) -> None:
        for cell in cells:
            self.contents.pop(cell, None)
            self.released += 1

    def advance(
        self,
        segment: StateSegment,
        start: int,
        life: int,
        epoch: int,
        after: Callable[[int], int],
    ) -> None:
        """A step's rows of one sequence, which begin at a position. after: what a state is after so
        many of the rows; 0 of them: before the first."""
        if segment.read is not None:
            self._use(segment.read, _Use(life, epoch, False))
        held = NOTHING if segment.read is None else self.contents.get(segment.read)
        if held != (start, after(0)):
            raise MistakeError(
                f"cell {segment.read} holds {held}, and a step begins at {start} with {after(0)}"
            )
        if not segment.writes or segment.writes[-1][0] != segment.count:
            raise MistakeError(f"the state after the last row is lost: {segment}")
        for rows, cell in segment.writes:
            self._use(cell, _Use(life, epoch, True))
            self.contents[cell] = (start + rows, after(rows))

    def _use(self, cell: int, use: _Use) -> None:
        """Whoever comes to a cell of another one waits until nothing of that one runs."""
        running = [its for its in self._uses.get(cell, []) if its.epoch > self.completed_epoch]
        for other in running:
            if other.life != use.life and (other.writes or use.writes):
                raise MistakeError(f"cell {cell}: {use}, and {other} may still run")
        self._uses[cell] = [*running, use]
