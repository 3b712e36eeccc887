"""The stopwatches' arithmetic, and one small server under them."""

from pathlib import Path

import pytest

from tests.bench.hostwork import (
    MLX,
    STEP,
    TURN,
    WARM_UP_STEPS,
    Stopwatches,
    measure,
    outside_mlx,
)
from tests.bench.models import SERVING, write_endless_model


def test_only_steps_with_most_streams_count_and_each_by_its_tokens() -> None:
    watches = Stopwatches(streams=4)
    for number in range(2 * WARM_UP_STEPS + 1):
        watches._keep({STEP: 8e-6, "commit": 4e-6}, 4 if number % 2 else 2, watches.steps)
        watches._keep({STEP: 8e-6, "commit": 4e-6}, 4, watches.steps)
        watches._keep({TURN: 12e-6}, 3, watches.turns)
    assert len(watches.steps) == 3 * WARM_UP_STEPS + 1
    medians = watches.medians()
    assert {name: round(value, 6) for name, value in medians.items()} == {
        STEP: 2.0,
        "commit": 1.0,
        TURN: 4.0,
    }


def test_too_few_steps_say_nothing() -> None:
    with pytest.raises(RuntimeError, match="only 0 steps had most of 4 streams"):
        Stopwatches(streams=4).medians()


def test_what_is_mlxs_own_is_no_work_of_the_host() -> None:
    medians = dict.fromkeys(MLX, 2.0) | {STEP: 10.0, TURN: 5.0, "commit": 1.0}
    assert outside_mlx(medians) == 10.0 + 5.0 - 2.0 * len(MLX)


def test_a_server_is_measured_from_outside_and_inside(tmp_path: Path) -> None:
    model = write_endless_model(tmp_path / "model", SERVING)
    # So many that the second one comes while the first one is answered, however busy the machine.
    medians = measure(model, streams=2, tokens=1500, overlap=True)
    for name in (*MLX, STEP, TURN, "schedule", "commit", "encode", "tokens per second"):
        assert medians[name] > 0, name
    assert 0 < outside_mlx(medians) < medians[STEP] + medians[TURN]
