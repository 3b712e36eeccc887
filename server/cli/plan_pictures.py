"""The capacity report as pictures: matplotlib draws SVG files without a screen. Only ``quire plan
--out`` imports this module: matplotlib comes with the extra ``plan``."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from engine.planning.capacity import CapacityReport
from server.cli.sentences import tokens_label

GIB = 1024**3
WEIGHTS_COLOUR = "#4878a8"
KV_COLOUR = "#e49444"
# One colour for each allocation: Okabe and Ito's palette (jfly.uni-koeln.de/color),
# which people with colour blindness can tell apart.
SERIES_COLOURS = ("#d55e00", "#56b4e9", "#0072b2")
LIMIT_COLOUR = "#444444"
SIZE_INCHES = (8.0, 4.6)
# Height of the strip with the model's name, as a part of the figure's height.
SIGNATURE_HEIGHT = 0.04
# Without date and random names the same report gives a file of the same bytes.
SVG_METADATA = {"Date": None, "Creator": "quire plan"}


def draw_pictures(report: CapacityReport, folder: Path, model: str) -> list[Path]:
    """Draw the pictures into a folder; return the files. model: its name. Raises OSError."""
    pictures: dict[str, Callable[[CapacityReport], Figure]] = {
        "weights-and-kv": weights_and_kv,
        "fit": fit,
    }
    files = []
    with matplotlib.rc_context({"svg.hashsalt": "quire", "font.size": 10}):
        for name, draw in pictures.items():
            file = folder / f"{name}.svg"
            figure = draw(report)
            _sign(figure, model)
            figure.savefig(file, metadata=SVG_METADATA)
            files.append(file)
    return files


def weights_and_kv(report: CapacityReport) -> Figure:
    """Draw the bytes of weights, and of K and V, against the context's length."""
    stored = report.by_context[0].weights.name
    figure, axes = _figure(f"Weights ({stored}) against K and V (bf16) by context", report)
    known = report.shape.spec.max_position_embeddings
    labels = [tokens_label(r.context) + " *" * (r.context > known) for r in report.by_context]
    kept = "K, V and states" if report.by_context[0].states_bytes else "K and V"
    weights = [resident.weights_bytes / GIB for resident in report.by_context]
    axes.bar(labels, weights, 0.6, color=WEIGHTS_COLOUR, label="weights")
    beside = [resident.kept_bytes / GIB for resident in report.by_context]
    bars = axes.bar(labels, beside, 0.6, bottom=weights, color=KV_COLOUR, label=kept)
    sums = [f"{resident.total_bytes / GIB:.1f}" for resident in report.by_context]
    axes.bar_label(bars, sums, padding=3)
    room = (report.demand.usable_bytes - report.demand.fixed_bytes) / GIB
    axes.axhline(room, color=LIMIT_COLOUR, linestyle="--", label=f"room for both: {room:.1f} GiB")
    beyond = f"; * beyond the {known} positions that the model knows"
    marked = beyond * (report.by_context[-1].context > known)
    return _labelled(figure, f"context (tokens){marked}", "resident (GiB)")


def fit(report: CapacityReport) -> Figure:
    """Draw how many sequences fit, for each format of weights and each kind of allocation. Every
    sequence is a fifth of the context long."""
    title = f"Sequences of {report.fifth_tokens} tokens that fit, context {report.context}"
    figure, axes = _figure(title, report)
    width = 0.8 / len(report.allocations)
    for number, allocation in enumerate(report.allocations):
        counts = [fit.fifth_context[number] for fit in report.fits]
        places = [place + (number - 1) * width for place in range(len(counts))]
        bars = axes.bar(places, counts, width, color=SERIES_COLOURS[number], label=allocation.name)
        axes.bar_label(bars, padding=2)
    axes.set_xticks(range(len(report.fits)), [fit.resident.weights.name for fit in report.fits])
    return _labelled(figure, "weights", "sequences at once")


def _labelled(figure: Figure, x: str, y: str) -> Figure:
    """Name the axes, and draw the legend below the plot, where it hides nothing."""
    figure.axes[0].set(xlabel=x, ylabel=y)
    figure.axes[0].margins(y=0.1)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _sign(figure: Figure, model: str) -> None:
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, SIGNATURE_HEIGHT, 1, 1 - SIGNATURE_HEIGHT))
    figure.text(0.99, 0.01, model, ha="right", va="bottom", fontsize=8, color=LIMIT_COLOUR)


def _figure(title: str, report: CapacityReport) -> tuple[Figure, Axes]:
    """Make a figure with axes, without the top and right frame lines."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(f"{title} - {report.device.name}, {report.device.memory_bytes / GIB:.0f} GiB")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes
