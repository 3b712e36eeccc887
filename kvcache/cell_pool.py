"""Allocates cells: the states of all recurrent layers of one sequence at one position.

::

    free -> held by one sequence, which writes it -> waiting for its epoch -> free
              |                                        ^
              v                                        | (held by nobody, and cannot be found)
            sealed: found by its position, held by all sequences that go on from it
              |
              v
            cached: found by its position, held by nobody -> evicted -> free

A sealed cell is never written again. A cell is handed out again when the newest step that may touch
it has completed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from kvcache.block import Prefix
from kvcache.evictions import Evictions
from kvcache.stats import CellStats


class Keep(IntEnum):
    """Why a sealed cell is kept. Of cells that were used at the same time, the first kinds are
    evicted first."""

    WAYPOINT = 0
    """So that a long prompt need not be computed from its beginning. Evicted before all others."""
    END = 1
    """A turn ends here, or two conversations were seen to part."""
    USER = 2
    """The newest message of a person ends here: thoughts that follow may be dropped."""
    SYSTEM = 3
    """The system prompt and the tools end here."""


@dataclass(slots=True, eq=False)
class Cell:
    """A cell and all that is known of it."""

    number: int
    holders: int = 0
    """Open sequences that write it or go on from it, and the queue of those to be sealed."""
    epoch: int = 0
    """The newest step that may touch it."""
    prefix: Prefix | None = None
    """The block after which it is found."""
    position: int = 0
    """How many tokens are before it, once it is sealed."""
    conversation: int = 0
    """The first sequence that sealed one of its conversation, once it is sealed."""
    keep: Keep = Keep.WAYPOINT
    last_use: int = 0
    dirty: bool = False
    """Whether it may hold memory of the system."""

    @property
    def is_cached(self) -> bool:
        """Return whether it can be found, and nobody holds it."""
        return self.prefix is not None and not self.holders

    def __str__(self) -> str:
        return f"cell {self.number}"


class CellPool:
    """All cells under one number."""

    def __init__(self, capacity: int) -> None:
        """capacity: how many there are."""
        self.cells = [Cell(number) for number in range(capacity)]
        self._free = list(reversed(self.cells))
        self._waiting: list[Cell] = []
        """Let go of, and perhaps still touched by a step."""
        self._completed_epoch = 0
        self._uses = 0
        self.evicted = Evictions()
        """Digests of blocks after which there was a cell."""
        self.num_evicted = 0
        """Since the start."""

    # --- counts ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Return how many cells there are."""
        return len(self.cells)

    @property
    def recovering(self) -> bool:
        """Return whether cells could be handed out when the steps in flight have completed."""
        done = self._completed_epoch
        return bool(self._waiting) or any(c.is_cached and c.epoch > done for c in self.cells)

    def stats(self, cell_bytes: int, committed_bytes: int) -> CellStats:
        """Return a snapshot: what all cells are for."""
        cached = dict.fromkeys(Keep, 0)
        for cell in self.cells:
            if cell.is_cached:
                cached[cell.keep] += 1
        return CellStats(
            cells=self.capacity,
            free=len(self._free),
            held=sum(cell.holders > 0 for cell in self.cells),
            cached=tuple((keep.name.lower(), count) for keep, count in cached.items()),
            waiting=len(self._waiting),
            evicted=self.num_evicted,
            cell_bytes=cell_bytes,
            committed_bytes=committed_bytes,
        )

    # --- the circle -----------------------------------------------------------------------------

    def take(self) -> Cell | None:
        """Hand out a cell, evicting a cached one where none is free; None where there is none."""
        if not self._free and not self.evict():
            return None
        cell = self._free.pop()
        assert not cell.holders, f"{cell} is held"
        assert cell.prefix is None, f"{cell} can be found"
        cell.holders, cell.dirty, cell.keep = 1, True, Keep.WAYPOINT
        return cell

    def hold(self, cell: Cell) -> None:
        """Note that one sequence more goes on from a cell."""
        cell.holders += 1

    def let_go(self, cell: Cell) -> None:
        """Note that one holder less has the cell; free it where nobody has it and nobody can find
        it."""
        assert cell.holders > 0, f"{cell} is held by nobody"
        cell.holders -= 1
        self._free_if_lost(cell)

    def seal(self, cell: Cell, prefix: Prefix, keep: Keep) -> None:
        """Let others find a cell after a block that has none. Its writer has completed."""
        assert prefix.cell is None, f"a cell stands where {cell} is to stand"
        assert cell.prefix is None, f"{cell} is sealed"
        cell.prefix, cell.keep, prefix.cell = prefix, keep, cell
        self.evicted.discard(prefix.digest)
        self.use((cell,))

    def use(self, cells: Iterable[Cell]) -> None:
        """Note that these cells, of one conversation, are of use now."""
        self._uses += 1
        for cell in cells:
            cell.last_use = self._uses

    def forget(self, cell: Cell, *, evicted: bool) -> None:
        """Note that a cell is found no more. evicted: for want of room, or of use; else because its
        block is in doubt."""
        assert cell.prefix is not None, f"{cell} cannot be found"
        if evicted:
            self.evicted.add(cell.prefix.digest)
            self.num_evicted += 1
        cell.prefix.cell = None
        cell.prefix = None
        self._free_if_lost(cell)

    def evict(self) -> bool:
        """Forget the cached cell that is likely to be missed least, and that no step touches; False
        when there is none."""
        done = self._completed_epoch
        cached = [cell for cell in self.cells if cell.is_cached and cell.epoch <= done]
        if not cached:
            return False
        self.forget(min(cached, key=_eviction_order), evicted=True)
        return True

    def advance(self, completed_epoch: int) -> None:
        """Free the cells that no step touches any more."""
        self._completed_epoch = completed_epoch
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            (self._free if cell.epoch <= completed_epoch else self._waiting).append(cell)

    @property
    def dirty_cells(self) -> list[Cell]:
        """Return the cells that may hold memory of the system."""
        return [cell for cell in self.cells if cell.dirty]

    def clean(self) -> list[Cell]:
        """Return the free cells that may hold memory of the system, which the caller releases."""
        found = [cell for cell in self._free if cell.dirty]
        for cell in found:
            cell.dirty = False
        return found

    def _free_if_lost(self, cell: Cell) -> None:
        if not cell.holders and cell.prefix is None:
            done = cell.epoch <= self._completed_epoch
            (self._free if done else self._waiting).append(cell)

    def check_invariants(self, holders: Iterable[Cell]) -> None:
        """Count again. holders: the cell of each holder. Raises AssertionError."""
        counted = dict.fromkeys(self.cells, 0)
        for cell in holders:
            counted[cell] += 1
        lost = {*self._free, *self._waiting}
        assert len(lost) == len(self._free) + len(self._waiting), "a cell is free twice"
        stats = self.stats(0, 0)
        parts = stats.free + stats.held + sum(dict(stats.cached).values()) + stats.waiting
        assert parts == stats.cells, f"{stats}: the parts are not the whole"
        for cell, count in counted.items():
            assert cell.holders == count, f"{cell} has {cell.holders} holders, not {count}"
            assert (cell in lost) == (not count and cell.prefix is None), f"{cell} has leaked"
            assert cell.prefix is None or cell.prefix.cell is cell, f"{cell} is found elsewhere"


def _eviction_order(cell: Cell) -> tuple[bool, int, Keep]:
    """Waypoints first; then who was used longest ago, and of one conversation the lesser kind."""
    return cell.keep is not Keep.WAYPOINT, cell.last_use, cell.keep
