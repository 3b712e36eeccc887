"""The capacity report as pictures: matplotlib draws SVG files without a screen. Only ``quire plan
--out`` imports this module: matplotlib comes with the extra ``plan``."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from engine.planning.capacity import CHUNK_TOKENS, BlockAccount, CapacityReport
from engine.planning.memory import BF16, Resident

GIB = 1024**3
KIB = 1024
WEIGHTS_COLOUR = "#4878a8"
KV_COLOUR = "#e49444"
# One colour for each allocation or mean length: Okabe and Ito's palette (jfly.uni-koeln.de/color),
# which people with colour blindness can tell apart.
SERIES_COLOURS = ("#d55e00", "#56b4e9", "#0072b2", "#e69f00")
LIMIT_COLOUR = "#444444"
WIDE_INCHES = (11.0, 4.6)
SIZE_INCHES = (8.0, 4.6)
CURVE_POINTS = 400
# Height of the strip with the model's name, as a part of the figure's height.
SIGNATURE_HEIGHT = 0.04
# Without date and random names the same report gives a file of the same bytes.
SVG_METADATA = {"Date": None, "Creator": "quire plan"}


def draw_pictures(report: CapacityReport, folder: Path, model: str) -> list[Path]:
    """Draw the pictures into a folder; return the files. model: its name. Raises OSError."""
    pictures: dict[str, Callable[[CapacityReport], Figure]] = {
        "weights-and-kv": weights_and_kv,
        "quantisation": quantisation,
        "committed": committed,
        "block-size": block_size,
        "fit": fit,
    }
    if report.crowd is not None:
        pictures["crowd"] = crowd
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
    figure, (axes,) = _figure("Weights against K and V by context (bf16)", report)
    known = report.shape.max_position_embeddings
    labels = [tokens_label(r.context) + " *" * (r.context > known) for r in report.by_context]
    _stack(axes, axes.bar, "bottom", labels, report.by_context)
    room = _room_bytes(report) / GIB
    axes.axhline(room, color=LIMIT_COLOUR, linestyle="--", label=f"room for both: {room:.1f} GiB")
    beyond = f"; * beyond the {known} positions that the model knows"
    axes.set_xlabel("context (tokens)" + beyond * (report.by_context[-1].context > known))
    axes.set_ylabel("resident (GiB)")
    axes.legend(loc="upper left", frameon=False)
    axes.margins(y=0.1)
    return figure


def quantisation(report: CapacityReport) -> Figure:
    """Draw the memory for one full context against the types of weights and of K and V."""
    figure, (axes,) = _figure(f"What quantisation buys at {report.context} tokens", report)
    steps = [step.resident for step in reversed(report.steps)]
    labels = [f"{r.weights.name}/{r.kv.name}" + " *" * (r.kv != BF16) for r in steps]
    _stack(axes, axes.barh, "left", labels, steps)
    room = _room_bytes(report) / GIB
    axes.axvline(room, color=LIMIT_COLOUR, linestyle="--", label=f"room for both: {room:.1f} GiB")
    axes.set_xlabel("resident (GiB); * not to be had: quire keeps K and V in bf16 or float32")
    axes.set_ylabel("weights / K and V")
    axes.set_xlim(0, 1.12 * max(room, *(r.total_bytes / GIB for r in steps)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    return figure


def committed(report: CapacityReport) -> Figure:
    """Draw a sequence's committed memory by its length: to the full context, and to a short one."""
    figure, both = _figure("Committed for one sequence, by its length", report, 2)
    short = min(report.context, 4 * CHUNK_TOKENS)
    for axes, longest in zip(both, (report.context, short), strict=True):
        step = max(1, longest // CURVE_POINTS)
        lengths = list(range(1, longest + 1, step))
        per_token = report.allocations[0].layout.shape.bytes_per_token
        scale, unit = (GIB, "GiB") if longest * per_token >= GIB else (KIB * KIB, "MiB")
        for allocation, colour in zip(report.allocations, SERIES_COLOURS, strict=False):
            charged = [allocation.committed_bytes(n) / scale for n in lengths]
            axes.plot(lengths, charged, color=colour, label=allocation.name)
        used = [n * per_token / scale for n in lengths]
        axes.plot(lengths, used, color=LIMIT_COLOUR, linestyle="--", label="used")
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel(f"committed ({unit})")
    axes.set_title("while it is short", fontsize=10)
    # Cut off the line of the dense allocation: at its height the other lines would look flat.
    axes.set_ylim(0, 1.3 * longest * per_token / scale)
    both[0].legend(frameon=False)
    return figure


def block_size(report: CapacityReport) -> Figure:
    figure, (waste, mappings, time) = _figure("What a page size costs", report, 3)
    means = sorted({account.mean_tokens for account in report.blocks})
    for mean, colour in zip(means, SERIES_COLOURS, strict=True):
        accounts = [account for account in report.blocks if account.mean_tokens == mean]
        pages, label = _pages(accounts), f"{tokens_label(mean)} tokens"
        waste.plot(pages, [a.waste for a in accounts], "o-", color=colour, label=label)
        mappings.plot(pages, [a.mappings_scattered for a in accounts], "o-", color=colour)
    waste.yaxis.set_major_formatter(PercentFormatter(1.0))
    waste.set_ylabel("empty tail, of what is committed")
    waste.legend(title="mean length", frameon=False)
    mappings.set_yscale("log")
    mappings.set_ylabel("mappings of one sequence, scattered")
    accounts = [account for account in report.blocks if account.mean_tokens == means[0]]
    times = [account.mapping_s_per_token * 1e6 for account in accounts]
    time.plot(_pages(accounts), times, "o-", color=LIMIT_COLOUR)
    time.set_ylabel("mapping time per new token (us)")
    time.set_ylim(bottom=0)
    for axes in (waste, mappings, time):
        axes.set_xlabel("page (KiB)")
    return figure


def fit(report: CapacityReport) -> Figure:
    """Draw how many sequences of mean length fit, by type of weights and allocation of K and V."""
    title = f"Sequences of {report.mean_tokens} tokens that fit, context {report.context}"
    figure, (axes,) = _figure(title, report)
    width = 0.8 / len(report.allocations)
    for number, allocation in enumerate(report.allocations):
        counts = [fit.mean_length[number] for fit in report.fits]
        places = [place + (number - 1) * width for place in range(len(counts))]
        bars = axes.bar(places, counts, width, color=SERIES_COLOURS[number], label=allocation.name)
        axes.bar_label(bars, padding=2)
    axes.set_xticks(range(len(report.fits)), [fit.weights.name for fit in report.fits])
    axes.set_xlabel("weights")
    axes.set_ylabel("sequences at once")
    axes.legend(loc="upper left", frameon=False)
    axes.margins(y=0.1)
    return figure


def crowd(report: CapacityReport) -> Figure:
    assert report.crowd is not None
    title = f"{report.crowd.requests} requests at once, {report.crowd.weights.name} weights"
    figure, (running, charged) = _figure(title, report, 2)
    for allocation, outcome, colour in zip(
        report.allocations, report.crowd.reports, SERIES_COLOURS, strict=False
    ):
        times = [moment.start_s for moment in outcome.moments]
        counts = [moment.running for moment in outcome.moments]
        sizes = [moment.committed_bytes / GIB for moment in outcome.moments]
        running.step(times, counts, where="post", color=colour, label=allocation.name, lw=1)
        charged.step(times, sizes, where="post", color=colour, lw=1)
    running.set_ylabel("sequences running")
    running.legend(frameon=False)
    budget = report.crowd.room.total_bytes / GIB
    charged.axhline(budget, color=LIMIT_COLOUR, linestyle="--", label=f"budget: {budget:.1f} GiB")
    charged.set_ylabel("committed (GiB)")
    charged.legend(loc="lower right", frameon=False)
    for axes in (running, charged):
        axes.set_xlabel("simulated time (s)")
        axes.set_ylim(bottom=0)
    return figure


def _stack(
    axes: Axes,
    draw: Callable[..., BarContainer],
    base: str,
    labels: Sequence[str],
    residents: Sequence[Resident],
) -> None:
    """Draw stacked bars of weights, K and V. base: ``draw``'s argument for where a bar starts."""
    kept = "K, V and states" if residents[0].states_bytes else "K and V"
    weights = [resident.weights_bytes / GIB for resident in residents]
    draw(labels, weights, 0.6, color=WEIGHTS_COLOUR, label="weights")
    beside = [resident.kept_bytes / GIB for resident in residents]
    bars = draw(labels, beside, 0.6, **{base: weights}, color=KV_COLOUR, label=kept)
    sums = [f"{resident.total_bytes / GIB:.1f}" for resident in residents]
    axes.bar_label(bars, sums, padding=3)


def _sign(figure: Figure, model: str) -> None:
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, SIGNATURE_HEIGHT, 1, 1 - SIGNATURE_HEIGHT))
    figure.text(0.99, 0.01, model, ha="right", va="bottom", fontsize=8, color=LIMIT_COLOUR)


def tokens_label(tokens: int) -> str:
    """Format a number of tokens for an axis, such as 2k for 2048."""
    return f"{tokens // KIB}k" if tokens % KIB == 0 else str(tokens)


def _figure(title: str, report: CapacityReport, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure with axes side by side, without the top and right frame lines."""
    figure = Figure(figsize=SIZE_INCHES if columns == 1 else WIDE_INCHES, layout="constrained")
    figure.suptitle(f"{title} - {report.device.name}, {report.memory_bytes / GIB:.0f} GiB")
    every: list[Axes] = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, every


def _room_bytes(report: CapacityReport) -> int:
    return report.demand.usable_bytes - report.demand.fixed_bytes


def _pages(accounts: list[BlockAccount]) -> list[str]:
    return [str(account.page_bytes // KIB) for account in accounts]
