from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.types import Histogram
from server.metrics.families import histograms


def text_of(*families: Metric) -> str:
    class Given(Collector):
        def collect(self) -> tuple[Metric, ...]:
            return families

    registry = CollectorRegistry()
    registry.register(Given())
    return generate_latest(registry).decode()


def test_buckets_hold_those_of_all_smaller_ones() -> None:
    counted = Histogram((0.5, 2.0))
    for value in (0.1, 1.0, 1.5, 9.0):
        counted.observe(value)
    text = text_of(histograms("x_seconds", (), [((), counted.snapshot)], "Times"))
    assert text.splitlines() == [
        "# HELP x_seconds Times",
        "# TYPE x_seconds histogram",
        'x_seconds_bucket{le="0.5"} 1.0',
        'x_seconds_bucket{le="2.0"} 3.0',
        'x_seconds_bucket{le="+Inf"} 4.0',
        "x_seconds_count 4.0",
        "x_seconds_sum 11.6",
    ]
