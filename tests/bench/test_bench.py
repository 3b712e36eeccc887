"""The parts of ``make bench`` from end to end, small; and the figures that are computed of them."""

import math
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench import constraints, front, limits, serving
from tests.bench.__main__ import main
from tests.bench.hostwork import MLX, STEP, TURN, WARM_UP_STEPS, Stopwatches, measure, outside_mlx
from tests.bench.load import Answer, LoadResult, together_per_s
from tests.bench.models import SERVING, write_endless_model
from tests.bench.table import Ratio, Row

ROWS = (
    "constraints, 16 streams",
    "serving, 8 streams",
    "time to first token, 1 stream",
    "first token behind the front of several models",
)


def test_the_table_has_what_every_part_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small: dict[ModuleType, dict[str, object]] = {
        constraints: {"STEPS": 5, "WARM_UP_STEPS": 2},
        serving: {"STREAMS": (1, 8), "MAX_TOKENS": 8},
        front: {"PAIRS": 3, "WARM_UP_PAIRS": 1},
        limits: {"MEMORY_BYTES": 2 * 1024**2},
    }
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    assert main(["--quick", "--rounds", "1"]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    for row in ROWS:
        assert any(line.startswith(row) for line in lines), row
    assert any("mlx_lm.server" in line for line in lines)


def test_a_ratio_is_of_the_medians_and_above_one_in_our_favour() -> None:
    ratio = Ratio.of([10, 40, 20], [10, 10, 40])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 0.5, 4.0)
    faster = Row.higher_is_better("serving", "tok/s", [10, 40, 20], ("peer", [10, 10, 10]), 1.5)
    slower = Row.lower_is_better("latency", "ms", [200, 100, 200], ("peer", [100, 100, 100]), 1)
    assert faster.cells()[2:] == (
        "20.0 (10.0..40.0)", "10.0  peer", "2.00 (1.00..4.00)", "ratio >= 1.5", "met"
    )  # fmt: skip
    assert slower.cells()[4:] == ("0.50 (0.50..1.00)", "ratio >= 1", "MISSED")
    unknown = Row.higher_is_better("r", "u", [1, 2], ("p", [1, math.nan]), least=1.0)
    assert unknown.cells()[3:] == ("-  p", "-", "-", "")


def an_answer(started_s: float, *text_times_s: float, tokens: int = 0) -> Answer:
    ended_s = max((started_s, *text_times_s)) + 1
    return Answer(started_s, ended_s, text_times_s, 9, tokens, None)


def test_a_load_is_of_all_its_answers_together() -> None:
    answers = [an_answer(10.0, 12.0, 13.0, tokens=30), an_answer(11.0, 19.0, tokens=20)]
    result = LoadResult(answers, client_cpu_s=2.5)
    assert (result.seconds, result.tokens_per_s, result.client_share) == (10.0, 5.0, 0.25)
    assert result.ttfts_s == [2.0, 8.0]
    assert math.isnan(LoadResult([*answers, an_answer(12.0, 13.0)], 2.5).tokens_per_s)


def test_streams_decode_together_from_the_last_first_text_to_the_first_last_one() -> None:
    early = an_answer(0, 1, 2, 3, 4, 5, tokens=5)
    late = an_answer(0, 3, 4, 5, 6, 7, tokens=9)
    assert together_per_s([early]) == early.decode_per_s == 1.0
    assert together_per_s([early, late]) == 1.0 + 2.0, "a text of the second one is two tokens"
    assert math.isnan(together_per_s([early, an_answer(0, 5, 6, tokens=2)]))


def test_only_steps_with_most_streams_count_and_each_by_its_tokens() -> None:
    watches = Stopwatches(streams=4)
    for number in range(2 * WARM_UP_STEPS + 1):
        watches._keep({STEP: 8e-6, "graph": 4e-6}, 4 if number % 2 else 2, watches.steps)
        watches._keep({STEP: 8e-6, "graph": 4e-6}, 4, watches.steps)
        watches._keep({TURN: 12e-6}, 3, watches.turns)
    medians = watches.medians()
    assert medians == pytest.approx({STEP: 2.0, "graph": 1.0, TURN: 4.0})
    assert outside_mlx(medians) == pytest.approx(2.0 + 4.0 - 1.0)


def test_the_host_is_measured_within_a_server(tmp_path: Path) -> None:
    model = write_endless_model(tmp_path / "model", SERVING)
    # So many that the second one comes while the first one is answered, however busy the machine.
    medians = measure(model, streams=2, tokens=1500, overlap=True)
    assert all(medians[name] > 0 for name in (*MLX, STEP, TURN, "schedule", "commit", "encode"))
