import csv
import math
from pathlib import Path

import pytest

from tests.bench.table import CSV_HEADINGS, Figures, Goal, Ratio, Row, render, write_csv

FASTER = Row.higher_is_better("serving", "tok/s", [10, 40, 20], ("peer", [10, 10, 10]), 1.5)
SLOWER = Row.lower_is_better("latency", "ms", [200, 100, 200], ("other", [100, 100, 100]), 1)


def test_a_ratio_is_of_the_medians_and_its_ends_are_of_single_rounds() -> None:
    ratio = Ratio.of([10, 40, 20], [10, 10, 40])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 0.5, 4.0)


def test_figures_say_how_far_they_are_apart() -> None:
    assert Figures.of([3, 1, 2, 9]) == Figures(2.5, 1, 9)
    assert Figures.of([20, 10, 40]).text() == "20.0 (10.0..40.0)"
    assert Figures.of([20]).text() == Figures.of([20, 20]).text() == "20.0"
    assert FASTER.cells()[2:5] == ("20.0 (10.0..40.0)", "10.0  peer", "2.00 (1.00..4.00)")


def test_what_is_not_known_in_one_round_is_not_known() -> None:
    assert Figures.of([1, math.nan, 2]).text() == "-"
    row = Row.higher_is_better("r", "u", [1, 2], ("p", [1, math.nan]), least=1.0)
    assert row.goal is None, "nobody missed what nobody measured"
    assert row.cells()[2:] == ("1.50 (1.00..2.00)", "-  p", "-", "-", "")


def test_a_ratio_needs_a_figure_of_both_in_every_round() -> None:
    with pytest.raises(ValueError, match="zip"):
        Ratio.of([1, 2], [1])


def test_a_ratio_above_one_is_in_our_favour_whichever_is_better() -> None:
    assert (FASTER.quire, FASTER.peer, FASTER.ratio.value) == (20, 10, 2.0)
    assert (SLOWER.quire, SLOWER.peer, SLOWER.ratio.value) == (200, 100, 0.5)
    assert (SLOWER.ratio.low, SLOWER.ratio.high) == (0.5, 1.0)


def test_a_goal_is_met_at_its_figure() -> None:
    assert Goal.at_least(1.5, 1.5) == Goal("ratio >= 1.5", met=True)
    assert Goal.at_least(1.4999, 1.5) == Goal("ratio >= 1.5", met=False)
    assert Goal.at_most(300.0, 300.0, "ms") == Goal("<= 300 ms", met=True)
    assert Goal.at_most(300.1, 300.0, "ms").met is False


def test_a_row_without_a_goal_is_not_judged_until_it_gets_one() -> None:
    row = Row.higher_is_better("r", "u", [1], ("p", [1]))
    assert row.goal is None
    assert row.cells()[-2:] == ("-", "")
    judged = row.with_goal(Goal("text", met=False))
    assert judged.cells()[-2:] == ("text", "MISSED")
    assert row.goal is None


def test_a_row_names_the_instruction_set_of_our_side_and_keeps_its_own() -> None:
    measured = FASTER.run_with("avx2").run_with("vnni")
    assert (FASTER.cells()[1], measured.cells()[1]) == ("", "avx2")
    assert measured.cells()[2:] == FASTER.cells()[2:]
    headings, _, row = render([measured]).splitlines()
    assert row[headings.index("instruction set") :].startswith("avx2 ")


def test_the_file_holds_every_row_under_its_headings(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    plain = Row.higher_is_better('of "a", b', "u", [1 / 3], ("p", [1]))
    write_csv(file, [FASTER.run_with("vnni"), SLOWER, plain])
    with file.open(newline="", encoding="utf-8") as written:
        rows = list(csv.DictReader(written))
    assert tuple(rows[0]) == CSV_HEADINGS
    assert rows[0] == {
        "row": "serving", "unit": "tok/s", "instruction_set": "vnni",
        "quire": "20", "quire_low": "10", "quire_high": "40",
        "peer_name": "peer", "peer": "10", "peer_low": "10", "peer_high": "10",
        "ratio": "2", "ratio_low": "1", "ratio_high": "4", "target": "ratio >= 1.5", "met": "true",
    }  # fmt: skip
    assert rows[1]["met"] == "false"
    assert (rows[2]["row"], rows[2]["quire"]) == ('of "a", b', "0.333333")
    assert (rows[2]["target"], rows[2]["met"]) == ("", "")
