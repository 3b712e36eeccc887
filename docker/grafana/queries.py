"""Expressions that boards repeat, over the chosen instances."""

from panels import CHOSEN, Query

RATE = "[$__rate_interval]"


def value(metric: str, by: str = "") -> str:
    """Sum a gauge over instances; by: a label that is kept."""
    return f"sum{_by(by)} ({metric}{{{CHOSEN}}})"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return a counter's gain per second."""
    return f"sum{_by(by)} (rate({metric}{{{CHOSEN}{where}}}{RATE}))"


def increase(metric: str, by: str = "") -> str:
    """Return a counter's gain per point of the picture."""
    return f"sum{_by(by)} (increase({metric}{{{CHOSEN}}}{RATE}))"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {buckets(histogram)})"


def buckets(histogram: str) -> str:
    """Return observations per second, by bucket."""
    return rate(f"{histogram}_bucket", "le")


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def percentiles(histogram: str) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in (0.5, 0.95, 0.99)]


def _by(label: str) -> str:
    return f" by ({label})" if label else ""
