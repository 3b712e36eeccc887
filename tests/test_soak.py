"""The fixed, short part of ``make soak``."""

from pathlib import Path

import pytest

from tests.models import write_model
from tests.soak import report, run


@pytest.mark.parametrize("substrate", ["posix", "dense"])
def test_random_requests_and_aborts_leave_nothing_behind(tmp_path: Path, substrate: str) -> None:
    outcome = run(write_model(tmp_path), substrate, requests=60, seed=3)
    assert outcome.problems() == [], report(outcome)
    assert outcome.completed + outcome.aborted == 60
    assert outcome.aborted > 0
    assert len(outcome.samples) >= 60
    assert any(sample.live for sample in outcome.samples)
