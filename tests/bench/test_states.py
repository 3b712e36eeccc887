"""The figures of gated delta nets are there, on a small model."""

from itertools import count
from pathlib import Path
from unittest import mock

from metal_ext import CpuWorkers
from tests.bench import states
from tests.bench.contest import Contest
from tests.bench.rounds import Rounds
from tests.engine.models.hybrids import SPEC
from tests.hybrids import FIELDS
from tests.metal_ext.deltas import DeltaShape
from tests.published import Published


def test_states_stand_beside_a_step_and_their_bytes(tmp_path: Path) -> None:
    with mock.patch.multiple(
        states, MODEL=Published(SPEC, FIELDS), SHAPE=DeltaShape(), LAYERS=2, COPIED_BYTES=1 << 22
    ):
        found = states.run_states(Rounds(1, 1.0), Contest(1, count(1)), tmp_path)
    goals = [row.goal.text if row.goal else None for row in found.rows]
    assert goals == ["ratio >= 10", None, "ratio >= 0.666667"]


def test_a_step_reads_every_cell_that_it_wrote_in_the_last_one() -> None:
    with mock.patch.multiple(states, SHAPE=DeltaShape(), LAYERS=1):
        its = states.DeltaStep(2, CpuWorkers(1))
    its.run(0)
    (cells,) = its._cells
    written = [cells.raw(cell).copy() for cell in range(4)]
    its.run(1)
    assert [bool(raw.any()) for raw in written] == [False, False, True, True]
    assert all(cells.raw(cell).any() for cell in range(4))
