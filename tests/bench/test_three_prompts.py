from pathlib import Path

import pytest

from tests.bench import three_prompts
from tests.bench.rounds import Rounds
from tests.bench.three_prompts import Pairs, _peer_row, _rows, run_three_prompts

TOTAL = float(sum(three_prompts.PROMPT_TOKENS))


def judged(ours: Pairs, together: list[float], apart: list[float]) -> list[bool]:
    """Of what was computed, and of the time."""
    return [row.goal.met for row in _rows(ours, together, apart) if row.goal is not None]


def test_time_is_judged_in_pairs_and_by_the_noise_of_one_after_another() -> None:
    steady = Pairs([10.0, 10.4, 10.2], [10.0, 10.0, 10.0])
    assert steady.ratio == pytest.approx(1.02)
    assert steady.noise == 0.05
    noisy = Pairs([11.0, 9.0, 14.0], [10.0, 8.0, 13.0])
    assert noisy.noise == pytest.approx(0.4)
    assert noisy.ratio == pytest.approx(1.1)
    slow = Pairs([25.0, 26.0, 24.0], [10.0, 10.0, 10.0])
    assert [judged(pairs, [TOTAL], [TOTAL]) for pairs in (steady, noisy, slow)] == [
        [True, True],
        [True, True],
        [True, False],
    ]


def test_rows_are_counted_exactly_on_both_sides() -> None:
    steady = Pairs([10.0], [10.0])
    assert judged(steady, [TOTAL, TOTAL], [TOTAL, TOTAL + 1])[0] is False
    assert judged(steady, [TOTAL - 1, TOTAL], [TOTAL, TOTAL])[0] is False


def test_the_peer_is_compared_by_how_much_longer_it_takes_together() -> None:
    row = _peer_row(Pairs([10.0], [10.0]), "other", Pairs([25.0, 26.0], [10.0, 10.0]))
    assert (row.quire, row.peer, row.peer_name) == (1.0, 2.55, "other")


def test_quire_computes_no_row_more_together_than_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(three_prompts, "PROMPT_TOKENS", (300, 50, 10))
    part = run_three_prompts(Rounds(2, 30), Rounds(0, 0), 1, tmp_path)
    counted, timed = part.rows
    assert (counted.quire, counted.peer) == (360, 360)
    assert counted.goal is not None
    assert counted.goal.met
    assert timed.quire > 0
    assert part.facts[0][1].startswith("2 pairs")
