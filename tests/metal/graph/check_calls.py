"""No call to MLX's encoder can be left out or bent without being found."""

import pytest

from tests.metal.graph import _standin
from tests.metal.graph.planted import SEEDS, Program, found_with, plants, programs


@pytest.mark.parametrize(("kind", "writer", "reader", "uneven"), programs())
def test_steps_may_overlap_wherever_mlx_ends_its_encoders(
    kind: str, writer: str, reader: str, uneven: bool
) -> None:
    for seed in SEEDS:
        _standin.seed(seed)
        assert Program(kind, writer, reader, uneven).run() == []


def test_every_call_is_needed(report: list[str]) -> None:
    missed, every = [], plants()
    for plant in every:
        found = found_with(plant)
        report.append(f"{plant}: {found[0] if found else 'NOT FOUND'}")
        if not found:
            missed.append(str(plant))
    _standin.take_mistakes()
    report.append(f"{len(every)} mistakes planted, {len(missed)} not found")
    assert missed == []
