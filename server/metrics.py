"""What /metrics shows: snapshots of the engine, and counts of requests."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.client import EngineClient
from engine.types import EngineStats, KVStats, MissReason

UNKNOWN_ROUTE = "none"
POOL_GAUGES = {
    "capacity": "K and V that the budget allows",
    "committed": "K and V that the system charges for",
    "live": "Tokens of sequences that are open",
    "partial_tail": "Unused ends of blocks that hold live tokens",
    "mapped_ahead": "Blocks of open sequences that hold no token yet",
    "cached": "Blocks kept for prefix hits, owned by no sequence",
    "quarantined": "Blocks that wait for the device, for unmapping or for their return",
    "free": "Blocks that can be handed out, made or not",
    "free_slack": "Free blocks that may still hold memory of the system",
}


class EngineCollector(Collector):
    """The engine's newest snapshot; never waits for the engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        stats = self._client.stats
        yield _gauge("quire_engine_alive_ratio", "1 while the engine runs", self._client.alive)
        yield from _engine(stats)
        if stats.kv is not None:
            yield from _pool(stats.kv)


class Metrics:
    """The registry of one server."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        self._requests = Counter(
            "quire_requests",
            "Requests by endpoint and status",
            ["endpoint", "status"],
            registry=self.registry,
        )

    def count_request(self, endpoint: str, status: int) -> None:
        """endpoint: a route's own path, never what a client sent."""
        self._requests.labels(endpoint, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class RequestCounter:
    """Counts every answer by its route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Notes the status as it goes out; the route is known only after routing."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        answered = False

        def note(status: int) -> None:
            nonlocal answered
            answered = True
            path = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            self._metrics.count_request(path, status)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            # Starlette answers a bug outside of all middleware.
            if not answered:
                note(500)
            raise


def _engine(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("quire_requests_running", "Sequences with memory", stats.running)
    yield _gauge("quire_requests_waiting", "Sequences without memory", stats.waiting)
    yield _counter("quire_steps", "Steps of the engine", stats.steps)
    yield _counter("quire_prompt_tokens", "Prompt tokens computed", stats.prompt_tokens)
    yield _counter(
        "quire_prompt_tokens_cached",
        "Prompt tokens that came from the cache",
        stats.cached_prompt_tokens,
    )
    yield _prefix_misses(stats)
    yield _counter("quire_generated_tokens", "Tokens generated", stats.generated_tokens)
    yield _counter("quire_preemptions", "Sequences that gave up their memory", stats.preemptions)
    yield _counter("quire_failed_rows", "Rows whose logits were not finite", stats.failed_rows)
    yield _counter(
        "quire_mapping_waits", "Steps that had to wait for a mapping", stats.mapping_waits
    )
    yield _counter("quire_kv_copied_bytes", "K and V bytes copied", stats.copied_bytes)
    yield _gauge("quire_step_duration_seconds", "Duration of the newest step", stats.step_seconds)
    yield _gauge("quire_step_budget_tokens", "Prompt tokens a step may take", stats.token_budget)


def _prefix_misses(stats: EngineStats) -> Metric:
    family = CounterMetricFamily(
        "quire_prefix_misses",
        "Requests of which more could have been shared, by why it was not",
        labels=["reason"],
    )
    misses = dict(stats.prefix_misses)
    for reason in MissReason:
        family.add_metric([reason.value], misses.get(reason, 0))
    return family


def _pool(kv: KVStats) -> Iterator[Metric]:
    for name, help_text in POOL_GAUGES.items():
        yield _gauge(f"quire_kv_{name}_bytes", help_text, getattr(kv, f"{name}_bytes"))
    yield _gauge("quire_kv_heaps", "Heaps that have been made", kv.num_heaps)
    kept = "Heaps whose memory stays with the process until it ends"
    yield _gauge("quire_kv_heaps_kept", kept, kv.kept_heaps)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=float(value))


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=float(value))
