"""Makes Prometheus metric families without ``_created`` (times of creation)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from engine.types import HistogramCounts

Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Pairs (values of a metric's labels, the metric's value for these labels)."""


def gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=float(value))


def counter(name: str, help_text: str, value: float) -> Metric:
    """Make a counter. The ending ``_total`` is added to ``name``."""
    return CounterMetricFamily(name, help_text, value=float(value))


def info(name: str, help_text: str, labels: dict[str, str]) -> Metric:
    """Make a gauge that is always 1 and has facts as labels."""
    return gauges(name, help_text, tuple(labels), [(tuple(labels.values()), 1)])


def each(
    make: Callable[[str, str, float], Metric],
    prefix: str,
    texts: Mapping[str, str],
    figures: object,
    suffix: str = "",
) -> Iterator[Metric]:
    """Yield a metric for each name in ``texts``: the attribute of ``figures`` with this name."""
    for name, text in texts.items():
        yield make(f"quire_{prefix}{name}{suffix}", text, getattr(figures, f"{name}{suffix}"))


def counters(name: str, help_text: str, labels: tuple[str, ...], values: Labelled) -> Metric:
    """Make a counter with labels. The ending ``_total`` is added to ``name``."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def gauges(name: str, help_text: str, labels: tuple[str, ...], values: Labelled) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def histogram(name: str, help_text: str, counts: HistogramCounts) -> Metric:
    return HistogramMetricFamily(name, help_text, buckets=_buckets(counts), sum_value=counts.total)


def histograms(
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], HistogramCounts]],
) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for label_values, counts in values:
        family.add_metric(label_values, buckets=_buckets(counts), sum_value=counts.total)
    return family


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    """Return Prometheus's buckets, each of which includes the counts of all smaller ones."""
    bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts.counts)), strict=True))
