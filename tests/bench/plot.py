"""What grows with what, as pictures: one frame per curve, drawn by matplotlib without a screen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from tests.bench.table import Figures

COLOURS = ("#a14a3b", "#4878a8", "#4f8a5b", "#e49444", "#7a5195")
FRAME_INCHES = (5.2, 4.2)
BAND_ALPHA = 0.18
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Curve:
    """Several lines over one axis."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: dict[str, list[Figures]]
    """By who was measured; one point for each x."""


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Medians as lines, and bands from the lowest to the highest. The file's ending says what it
    becomes. Raises OSError."""
    width, height = FRAME_INCHES
    figure = Figure(figsize=(width * len(curves), height), layout="constrained")
    with matplotlib.rc_context({"svg.hashsalt": "quire", "font.size": 10}):
        frames = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, curve in zip(frames, curves, strict=True):
            _draw_curve(axes, curve)
        figure.savefig(file, dpi=120)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    for number, (label, points) in enumerate(curve.lines.items()):
        if any(math.isnan(point.median) for point in points):
            continue
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(curve.x, [p.median for p in points], "o-", color=colour, label=label)
        lows, highs = [p.low for p in points], [p.high for p in points]
        axes.fill_between(curve.x, lows, highs, color=colour, alpha=BAND_ALPHA, linewidth=0)
    axes.set_title(curve.title, fontsize=10)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    axes.set_xscale("log", base=10 if curve.x[-1] % 10 == 0 else 2)
    axes.set_xticks(curve.x, [_short(x) for x in curve.x])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)


def _short(x: float) -> str:
    """2048 and 2000 are 2k."""
    for thousand in (1024, 1000):
        if x >= thousand and x % thousand == 0:
            return f"{x // thousand:g}k"
    return f"{x:g}"
