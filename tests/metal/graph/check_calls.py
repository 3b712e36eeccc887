"""No call to MLX's encoder can be left out or bent without being found."""

import pytest

from tests.metal.graph import _standin, planted_states
from tests.metal.graph.planted import SEEDS, Program, found_with, plants, programs


@pytest.mark.parametrize(("kind", "writer", "reader", "uneven"), programs())
def test_steps_may_overlap_wherever_mlx_ends_its_encoders(
    kind: str, writer: str, reader: str, uneven: bool
) -> None:
    for seed in SEEDS:
        _standin.seed(seed)
        assert Program(kind, writer, reader, uneven).run() == []


@pytest.mark.parametrize(("kind", "uneven"), planted_states.programs())
def test_so_may_steps_that_advance_states(kind: str, uneven: bool) -> None:
    for seed in SEEDS:
        _standin.seed(seed)
        assert planted_states.StateProgram(kind, uneven).run() == []


def test_every_call_is_needed(report: list[str]) -> None:
    missed = []
    every = [(plant, found_with) for plant in plants()]
    every += [(plant, planted_states.found_with) for plant in planted_states.plants()]
    for plant, find in every:
        found = find(plant)
        report.append(f"{plant}: {found[0] if found else 'NOT FOUND'}")
        if not found:
            missed.append(str(plant))
    _standin.take_mistakes()
    report.append(f"{len(every)} mistakes planted, {len(missed)} not found")
    assert missed == []
