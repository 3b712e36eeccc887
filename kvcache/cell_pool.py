"""Allocates cells, each with the states of all recurrent layers of one sequence at one position.

::

    free -> held: one sequence writes the cell -> waiting for the last step to end -> free
              |                                        ^
              v                                        | (no sequence has it or can find it)
            sealed: found by a prefix, held by all sequences that continue from it
              |
              v
            cached: found by a prefix, held by no sequence -> evicted -> free

A sealed cell is never written again. A cell is reused only after the newest step that may touch it.

Waypoints (states within long prompts) are evicted first, then the cell of the least worth: the
number of tokens it saves, times the likelihood that a prompt continues from the cell, divided by
the number of uses of cells since its last use. Using a cell uses all earlier cells of its chain."""

from collections.abc import Iterable
from typing import NamedTuple

from kvcache.block import Cell, Prefix, Retention
from kvcache.block_hashes import Evictions
from kvcache.stats import CellStats

# Rough relative likelihoods that a later prompt continues from a cell. It continues from a user
# message's end if reasoning is dropped or later ends were evicted, but from an earlier end of a
# turn only if the client sends back another answer than it got.
LIKELIHOOD = {
    Retention.WAYPOINT: 1.0,
    Retention.END: 1.0,
    Retention.USER: 2.0,
    Retention.SYSTEM: 1.0,
}
EARLIER_END_LIKELIHOOD = 0.1


class StateSegment(NamedTuple):
    """The cells (recurrent states) of one sequence in a step: one is read, others are written."""

    count: int  # type: ignore[assignment]  # not the method of tuples
    read: int | None
    """The number of the cell with the state before the step's rows; None stands for zeros."""
    writes: tuple[tuple[int, int], ...]
    """``(rows, cell)``, ascending: this cell gets the state after this number of rows. The last
    pair has ``count`` rows; its cell may be the one that was read."""


class CellPool:
    """All cells of a model, and the choice of cells to evict."""

    def __init__(self, capacity: int) -> None:
        self.cells = [Cell(number) for number in range(capacity)]
        self._free = list(reversed(self.cells))
        self._waiting: list[Cell] = []
        """Cells that no sequence uses any more, but that a step in flight may still touch."""
        self._completed_epoch = 0
        self._uses = 0
        self.evicted = Evictions()
        """Digests of prefixes whose cell was evicted."""
        self.num_evicted = 0

    @property
    def expendable(self) -> int:
        """The number of cells available without evicting other cells than waypoints."""
        return len(self._free) + sum(
            cell.retention is Retention.WAYPOINT for cell in self._evictable()
        )

    @property
    def recovering(self) -> bool:
        """Whether more cells become available when the steps in flight end."""
        done = self._completed_epoch
        return bool(self._waiting) or any(c.is_cached and c.epoch > done for c in self.cells)

    def stats(self, cell_bytes: int, committed_bytes: int) -> CellStats:
        cached = dict.fromkeys(Retention, 0)
        for cell in self.cells:
            if cell.is_cached:
                cached[cell.retention] += 1
        return CellStats(
            cells=len(self.cells),
            free=len(self._free),
            held=sum(cell.holders > 0 for cell in self.cells),
            cached=tuple((retention.name.lower(), count) for retention, count in cached.items()),
            waiting=len(self._waiting),
            evicted=self.num_evicted,
            cell_bytes=cell_bytes,
            committed_bytes=committed_bytes,
        )

    def take_for(self, retention: Retention, saves: int) -> Cell | None:
        """Take a cell for a state worth keeping, or return None if only cells worth more could be
        evicted. saves: the number of tokens that need not be computed again with this state."""
        worth = retention is not Retention.WAYPOINT, LIKELIHOOD[retention] * saves
        evictable = self._evictable()
        if not self._free and (not evictable or min(map(self._worth, evictable)) > worth):
            return None
        return self.take()

    def take(self) -> Cell | None:
        """Take a free cell, or evict a cell and take it; return None if neither is possible."""
        if not self._free and not self.evict():
            return None
        cell = self._free.pop()
        assert not cell.holders, f"{cell} is held"
        assert cell.prefix is None, f"{cell} can be found"
        cell.holders, cell.dirty, cell.retention = 1, True, Retention.WAYPOINT
        return cell

    def hold(self, cell: Cell) -> None:
        cell.holders += 1

    def let_go(self, cell: Cell) -> None:
        """Remove one user of a cell; free the cell if it has no user and cannot be found."""
        assert cell.holders > 0, f"{cell} has no holder"
        cell.holders -= 1
        self._free_if_lost(cell)

    def seal(self, cell: Cell, prefix: Prefix, retention: Retention, position: int) -> None:
        """Let sequences find a cell by its prefix, after the step that wrote it has completed."""
        assert prefix.cell is None, f"a cell stands where {cell} is to stand"
        assert cell.prefix is None, f"{cell} is sealed"
        cell.prefix, cell.retention, prefix.cell = prefix, retention, cell
        cell.position = position
        self.evicted.discard(prefix.digest)

    def use(self, chain: Iterable[Cell]) -> None:
        """Note that a sequence uses cells of a conversation. chain: these cells in order."""
        self._uses += 1
        before = newest_end = None
        for cell in chain:
            cell.before, cell.last_use, cell.is_earlier_end = before, self._uses, False
            if cell.retention is Retention.END:
                if newest_end is not None:
                    newest_end.is_earlier_end = True
                newest_end = cell
            before = cell

    def leave(self, cell: Cell) -> None:
        """Note that a conversation differs from here on: cells after this cell become waypoints."""
        for other in self.cells:
            before = other.before
            while before is not None and before is not cell:
                before = before.before
            if before is not None:
                other.retention = Retention.WAYPOINT

    def forget(self, cell: Cell, *, evicted: bool) -> None:
        """Remove a cell from its prefix. evicted: whether to count an eviction, which is False if
        the contents of the prefix's block are in doubt."""
        assert cell.prefix is not None, f"{cell} cannot be found"
        if evicted:
            self.evicted.add(cell.prefix.digest)
            self.num_evicted += 1
        cell.prefix.cell = None
        cell.prefix = None
        for other in self.cells:
            if other.before is cell:
                other.before = cell.before
        cell.before = None
        self._free_if_lost(cell)

    def evict(self) -> bool:
        """Evict the least worthy cached cell that no step touches; return False if none is left."""
        evictable = self._evictable()
        if not evictable:
            return False
        self.forget(min(evictable, key=self._worth), evicted=True)
        return True

    def _evictable(self) -> list[Cell]:
        done = self._completed_epoch
        return [cell for cell in self.cells if cell.is_cached and cell.epoch <= done]

    def _worth(self, cell: Cell) -> tuple[bool, float]:
        likelihood = EARLIER_END_LIKELIHOOD if cell.is_earlier_end else LIKELIHOOD[cell.retention]
        uses = self._uses - cell.last_use + 1
        return cell.retention is not Retention.WAYPOINT, likelihood * cell.saves / uses

    def advance(self, completed_epoch: int) -> None:
        self._completed_epoch = completed_epoch
        waiting, self._waiting = self._waiting, []
        for cell in waiting:
            (self._free if cell.epoch <= completed_epoch else self._waiting).append(cell)

    @property
    def dirty_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.dirty]

    def clean(self) -> list[Cell]:
        """Return the free cells that may occupy physical memory, for the caller to release."""
        cells = [cell for cell in self._free if cell.dirty]
        for cell in cells:
            cell.dirty = False
        return cells

    def _free_if_lost(self, cell: Cell) -> None:
        if not cell.holders and cell.prefix is None:
            done = cell.epoch <= self._completed_epoch
            (self._free if done else self._waiting).append(cell)

    def check_invariants(self, holders: Iterable[Cell]) -> None:
        """holders: each cell as often as it has users (``Cell.holders``)."""
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
