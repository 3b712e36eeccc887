from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from engine.planning.capacity import CapacityReport
from server.cli.plan import pictures
from server.cli.plan.pictures import draw_pictures, tokens_label

PICTURES = ["weights-and-kv", "quantisation", "committed", "block-size", "fit", "crowd"]


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_says_what_it_shows(report: CapacityReport, name: str) -> None:
    draw: Callable[[CapacityReport], Figure] = getattr(pictures, name.replace("-", "_"))
    figure = draw(report)
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert any(axes.get_legend() for axes in figure.axes)


def test_all_pictures_are_drawn_as_svg(report: CapacityReport, tmp_path: Path) -> None:
    files = draw_pictures(report, tmp_path)
    assert [file.name for file in files] == [f"{name}.svg" for name in PICTURES]
    for file in files:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_the_same_report_draws_the_same_bytes(report: CapacityReport, tmp_path: Path) -> None:
    first = [file.read_bytes() for file in draw_pictures(report, tmp_path)]
    assert first == [file.read_bytes() for file in draw_pictures(report, tmp_path)]


def test_a_crowd_that_was_not_simulated_is_not_drawn(
    hopeless: CapacityReport, tmp_path: Path
) -> None:
    assert "crowd.svg" not in [file.name for file in draw_pictures(hopeless, tmp_path)]


def test_the_stacked_bars_are_the_report(report: CapacityReport) -> None:
    (axes,) = pictures.weights_and_kv(report).axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[1]]
    assert tops == pytest.approx([r.total_bytes / 1024**3 for r in report.by_context])


def test_lengths_are_written_as_people_say_them() -> None:
    assert [tokens_label(n) for n in (256, 2048, 131072)] == ["256", "2k", "128k"]
