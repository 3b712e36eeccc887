"""Collects metrics of HTTP requests, refusals, connections and answers."""

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.types import Histogram
from server.metrics.answer_times import DURATION_BOUNDS_S, FINISH_REASONS, Latencies, RequestTimes
from server.metrics.families import counters, gauge, histogram, histograms

HTTP_BOUNDS_S = (0.001, 0.005, *DURATION_BOUNDS_S)


class Refusal(StrEnum):
    """Reasons for refusing a request, which are the values of a metric's label."""

    HOST = "host"
    ORIGIN = "origin"
    KEY = "key"
    TOO_LARGE = "too_large"
    BODIES = "bodies"
    TOO_SLOW = "too_slow"
    SLOW_READER = "slow_reader"
    BAD_HTTP = "bad_http"
    CONNECTIONS = "connections"
    QUEUE_FULL = "queue_full"
    KEY_SHARE = "key_share"
    DRAINING = "draining"


CountRefusal = Callable[[Refusal], None]


class HttpMetrics(Collector):
    """A server's registry and request metrics. Only the event loop's thread may use them."""

    def __init__(self, max_model_len: int) -> None:
        self._latencies = Latencies(max_model_len)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._refusals = Counter(dict.fromkeys(Refusal, 0))
        self._open_connections = 0
        self.draining = False
        """True while the server drains: running answers may end, new requests are refused."""
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def request_arrived(self) -> RequestTimes:
        return RequestTimes(self._latencies)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count a response that begins. ``endpoint`` is the route's pattern, not a real path."""
        self._requests[endpoint, str(status)] += 1

    def request_ended(self, endpoint: str, seconds: float) -> None:
        """Record the duration of a request whose response has ended."""
        if endpoint not in self._durations:
            self._durations[endpoint] = Histogram(HTTP_BOUNDS_S)
        self._durations[endpoint].observe(seconds)

    def count_refusal(self, reason: Refusal) -> None:
        self._refusals[reason] += 1

    def connection_opened(self) -> None:
        self._open_connections += 1

    def connection_closed(self) -> None:
        self._open_connections -= 1
        assert self._open_connections >= 0, "a connection was closed twice"

    async def page(self) -> bytes:
        """Return the text for a Prometheus scrape."""
        return self.render()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        durations = [((path,), counted.snapshot) for path, counted in self._durations.items()]
        refusals = [((reason.value,), count) for reason, count in self._refusals.items()]
        yield counters("quire_requests_total", ("endpoint", "status"), self._requests.items())
        yield histograms("quire_http_request_duration_seconds", ("endpoint",), durations)
        yield counters("quire_refused_requests_total", ("reason",), refusals)
        yield gauge("quire_open_connections", self._open_connections)
        yield gauge("quire_draining_ratio", self.draining)
        latencies = self._latencies
        finished = [((reason,), latencies.finished[reason]) for reason in FINISH_REASONS]
        yield counters("quire_requests_finished_total", ("reason",), finished)
        for name, measured in (
            ("quire_time_to_first_token_seconds", latencies.first_token_s),
            ("quire_inter_token_latency_seconds", latencies.inter_token_s),
            ("quire_request_duration_seconds", latencies.duration_s),
            ("quire_request_prompt_tokens", latencies.prompt_tokens),
            ("quire_request_generated_tokens", latencies.generated_tokens),
        ):
            yield histogram(name, measured.snapshot)
