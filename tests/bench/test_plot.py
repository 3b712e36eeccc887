import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.bench import plot
from tests.bench.plot import FORMATS, Curve, draw
from tests.bench.table import Figures

CURVE = Curve(
    "rate",
    "streams",
    "tokens per second",
    [1, 2, 4],
    {"quire": [Figures(10 * n, 9 * n, 11 * n) for n in (1, 2, 3)], "peer": [Figures(5, 5, 5)] * 3},
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def note(self: Figure, *arguments: object, **named: object) -> None:
        figures.append(self)
        save(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", note)
    return figures


@pytest.mark.parametrize("ending", FORMATS)
def test_a_picture_has_a_frame_per_curve_and_a_line_per_name(
    ending: str, tmp_path: Path, drawn: list[Figure]
) -> None:
    file = tmp_path / f"growth{ending}"
    draw([CURVE, Curve("cache", "blocks", "us", [10, 100], {"a": [Figures(1, 1, 2)] * 2})], file)
    assert file.stat().st_size > 1000
    rate, cache = drawn[0].axes
    assert [line.get_label() for line in rate.lines] == ["quire", "peer"]
    assert [np.array(line.get_ydata()).tolist() for line in rate.lines] == [
        [10, 20, 30],
        [5, 5, 5],
    ]
    assert [len(axes.collections) for axes in (rate, cache)] == [2, 1], "a band for each line"
    assert [label.get_text() for label in cache.get_xticklabels()] == ["10", "100"]
    assert [plot._short(x) for x in (512, 1000, 16384, 100_000)] == ["512", "1k", "16k", "100k"]
    assert (rate.get_xlabel(), rate.get_ylabel()) == ("streams", "tokens per second")


def test_who_has_no_figures_has_no_line(tmp_path: Path, drawn: list[Figure]) -> None:
    unknown = [Figures(math.nan, math.nan, math.nan)] * 3
    draw([Curve("rate", "x", "y", [1, 2, 4], {"silent": unknown})], tmp_path / "a.svg")
    assert drawn[0].axes[0].lines[:] == []
