from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from engine.planning.capacity import CapacityReport
from server.cli import plan_pictures as pictures
from server.cli.plan_pictures import draw_pictures

PICTURES = ["weights-and-kv", "fit"]


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_says_what_it_shows(report: CapacityReport, name: str) -> None:
    draw: Callable[[CapacityReport], Figure] = getattr(pictures, name.replace("-", "_"))
    figure = draw(report)
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    (legend,) = figure.legends
    figure.draw_without_rendering()
    below = legend.get_window_extent().y1
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert box.y0 >= below, "it hides nothing"


@pytest.fixture(scope="module")
def drawn(report: CapacityReport, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All pictures of the report."""
    return draw_pictures(report, tmp_path_factory.mktemp("drawn"), "org/model")


def test_all_pictures_are_drawn_as_svg(drawn: list[Path]) -> None:
    assert [file.name for file in drawn] == [f"{name}.svg" for name in PICTURES]
    for file in drawn:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
        assert "org/model" in file.read_text(), "it tells of which model it is"


def test_the_same_report_draws_the_same_bytes(
    drawn: list[Path], report: CapacityReport, tmp_path: Path
) -> None:
    again = draw_pictures(report, tmp_path, "org/model")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in drawn]


def test_a_model_that_does_not_fit_is_drawn(hopeless: CapacityReport, tmp_path: Path) -> None:
    names = [file.name for file in draw_pictures(hopeless, tmp_path, "org/model")]
    assert names == [f"{name}.svg" for name in PICTURES]


def test_the_stacked_bars_are_the_report(report: CapacityReport) -> None:
    (axes,) = pictures.weights_and_kv(report).axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[1]]
    assert tops == pytest.approx([r.total_bytes / 1024**3 for r in report.by_context])


def test_contexts_that_the_model_does_not_know_are_marked(report: CapacityReport) -> None:
    (axes,) = pictures.weights_and_kv(report).axes
    known = report.shape.spec.max_position_embeddings
    beyond = [r.context > known for r in report.by_context]
    assert ["*" in label.get_text() for label in axes.get_xticklabels()] == beyond
    assert ("* beyond" in axes.get_xlabel()) == any(beyond)
