"""All metrics of one server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from server.config import MetricsSection
from server.metrics.answer_times import Latencies, RequestTimes
from server.metrics.engine_figures import EngineCollector
from server.metrics.families import gauge, info
from server.metrics.process import Footprint, ProcessCollector
from server.metrics.requests import Refusal, RequestFigures
from server.metrics.vllm_names import VllmCollector

SystemMemory = Callable[[], tuple[int, int]]
"""Bytes of memory in all, and those that programs could get: of the machine, or of the container
where that has less."""


def machine_alone() -> tuple[int, int]:
    """Return the machine's memory, where no container's limit is known."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


class SystemCollector(Collector):
    """Collect the memory that all programs of the machine share."""

    def __init__(self, client: ServingEngine, memory: SystemMemory) -> None:
        """memory: asked at each scrape."""
        self._client = client
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        total, available = self._memory()
        yield gauge(
            "quire_system_memory_total_bytes",
            "Bytes of memory of the machine, or of the container where its limit is lower",
            total,
        )
        yield gauge(
            "quire_system_memory_available_bytes",
            "Bytes of memory that programs could still get without swapping",
            available,
        )
        swap = psutil.swap_memory()
        yield gauge(
            "quire_system_swap_used_bytes",
            "Bytes of memory that the system has swapped out, of all programs",
            swap.used,
        )
        yield gauge(
            "quire_memory_pressure_level",
            "How short of memory the operating system is: 0 is normal, 1 is a warning, 2 "
            "is critical",
            self._client.pressure,
        )


@dataclass(frozen=True, slots=True)
class About(Collector):
    """What is served, as the labels of quire_info."""

    model: str = ""
    """The name of the model in answers."""
    substrate: str = ""
    arithmetic: str = ""
    max_model_len: int = 32768

    def collect(self) -> Iterator[Metric]:
        labels = {
            "version": version("quire"),
            "model": self.model,
            "substrate": self.substrate,
            "arithmetic": self.arithmetic,
        }
        yield info(
            "quire_info",
            "Always 1; its labels name the version, the model, the KV cache substrate "
            "and the arithmetic",
            labels,
        )


NOTHING_KNOWN = About()
SETTINGS = MetricsSection()


class HttpMetrics:
    """The registry of what answers HTTP. Only its event loop calls."""

    def __init__(self, max_model_len: int) -> None:
        """max_model_len: tokens of the longest sequence."""
        self._latencies = Latencies(max_model_len)
        self._requests = RequestFigures(self._latencies)
        self.registry = CollectorRegistry()

    def request_arrived(self) -> RequestTimes:
        """Begin to measure a request that begins now."""
        return RequestTimes(self._latencies)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count a response that begins. endpoint: a route's own path, never what a client sent."""
        self._requests.count_request(endpoint, status)

    def request_ended(self, endpoint: str, seconds: float) -> None:
        """Observe the duration of a request whose response has ended."""
        self._requests.observe_duration(endpoint, seconds)

    def count_refusal(self, reason: Refusal) -> None:
        """Count a request or a connection that is refused."""
        self._requests.count_refusal(reason)

    def connection_opened(self) -> None:
        self._requests.open_connections += 1

    def connection_closed(self) -> None:
        """Count a connection that has ended."""
        self._requests.open_connections -= 1
        assert self._requests.open_connections >= 0, "a connection was closed twice"

    def set_draining(self, draining: bool) -> None:
        """Set whether running answers may end and no new ones begin."""
        self._requests.draining = draining

    def render(self) -> bytes:
        """Write the text that Prometheus scrapes."""
        return generate_latest(self.registry)


class Metrics(HttpMetrics):
    """The registry of a server with an engine."""

    def __init__(
        self,
        client: ServingEngine,
        about: About = NOTHING_KNOWN,
        *,
        settings: MetricsSection = SETTINGS,
        footprint: Footprint = int,
        memory: SystemMemory = machine_alone,
    ) -> None:
        """settings: what is shown beside our own names. footprint: see ProcessCollector; without
        it, K and V alone. memory: see SystemCollector."""
        super().__init__(about.max_model_len)
        collectors: list[Collector] = [
            about,
            self._requests,
            EngineCollector(client),
            ProcessCollector(client, footprint),
            SystemCollector(client, memory),
        ]
        if settings.vllm_names:
            collectors.append(VllmCollector(client, self._latencies, about.model))
        for collector in collectors:
            self.registry.register(collector)
