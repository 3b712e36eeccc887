"""Makes Prometheus metric families without ``_created`` (times of creation). The name of a counter
ends with ``_total``. metrics.toml has the help texts."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from engine.types import HistogramCounts

Labels = tuple[str, ...]
Labelled = Iterable[tuple[Labels, float]]
"""Pairs (values of a metric's labels, the metric's value for these labels)."""
HELP = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))


def gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, HELP[name], value=float(value))


def counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(name, HELP[name], value=float(value))


def each(
    make: Callable[[str, float], Metric], name: str, attributes: Iterable[str], figures: object
) -> Iterator[Metric]:
    """Yield a metric for each attribute of ``figures``. Its name replaces the {} in ``name``."""
    for attribute in attributes:
        yield make(name.format(attribute), getattr(figures, attribute))


def counters(name: str, labels: Labels, values: Labelled, help_text: str = "") -> Metric:
    family = CounterMetricFamily(name, help_text or HELP[name], labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def gauges(name: str, labels: Labels, values: Labelled, help_text: str = "") -> Metric:
    family = GaugeMetricFamily(name, help_text or HELP[name], labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, float(value))
    return family


def histogram(name: str, counts: HistogramCounts) -> Metric:
    return histograms(name, (), [((), counts)])


def histograms(
    name: str, labels: Labels, values: Iterable[tuple[Labels, HistogramCounts]], help_text: str = ""
) -> Metric:
    family = HistogramMetricFamily(name, help_text or HELP[name], labels=labels)
    for label_values, counts in values:
        # Each of Prometheus's buckets includes the counts of all smaller ones.
        bounds = [*map(floatToGoString, counts.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(counts.counts)), strict=True))
        family.add_metric(label_values, buckets=buckets, sum_value=counts.total)
    return family
