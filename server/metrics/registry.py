"""Collects all metrics of a server with an engine.

Metrics about the process have the names that all Prometheus clients use:
https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics"""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.machine import machine_memory
from engine.serving import ServingEngine
from server.config import MetricsSection
from server.metrics.engine_figures import EngineCollector
from server.metrics.families import counter, each, gauge, gauges
from server.metrics.requests import HttpMetrics
from server.metrics.vllm_names import VllmCollector

MEMORY_GAUGES = ("total_bytes", "available_bytes")
Footprint = Callable[[int], int]
"""A function from the bytes of K and V to all bytes that the system charges this process for."""


class SystemCollector(Collector):
    """Collects the operating system's figures about this process and the machine's memory."""

    def __init__(self, client: ServingEngine, footprint: Footprint) -> None:
        self._client = client
        self._footprint = footprint
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        process, kv = self._process, self._client.stats.kv
        with process.oneshot():
            used, times = process.memory_info(), process.cpu_times()
            threads, started = process.num_threads(), process.create_time()
        yield gauge("process_resident_memory_bytes", used.rss)
        yield gauge("process_virtual_memory_bytes", used.vms)
        yield counter("process_cpu_seconds_total", times.user + times.system)
        yield gauge("process_open_fds", process.num_fds())
        yield gauge("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        yield gauge("process_start_time_seconds", started)
        yield gauge("process_threads", threads)
        charged = self._footprint(0 if kv is None else kv.committed_bytes)
        yield gauge("quire_process_footprint_bytes", charged)
        memory = machine_memory()
        yield from each(gauge, "quire_system_memory_{}", MEMORY_GAUGES, memory)
        yield gauge("quire_system_swap_used_bytes", psutil.swap_memory().used)
        yield gauge("quire_memory_pressure_level", self._client.pressure)


@dataclass(frozen=True, slots=True)
class About(Collector):
    """The metric quire_info, with these fields as labels."""

    model: str = ""
    kv_backend: str = ""
    arithmetic: str = ""
    max_model_len: int = 32768

    def collect(self) -> Iterator[Metric]:
        labels = ("version", "model", "kv_backend", "arithmetic")
        values = (version("quire"), self.model, self.kv_backend, self.arithmetic)
        yield gauges("quire_info", labels, [(values, 1)])


NOTHING_KNOWN = About()
SETTINGS = MetricsSection()


class Metrics(HttpMetrics):
    """The registry of all metrics of a server with an engine."""

    def __init__(
        self,
        client: ServingEngine,
        about: About = NOTHING_KNOWN,
        *,
        settings: MetricsSection = SETTINGS,
        footprint: Footprint = int,
    ) -> None:
        super().__init__(about.max_model_len)
        for collector in (about, EngineCollector(client), SystemCollector(client, footprint)):
            self.registry.register(collector)
        if settings.vllm_names:
            self.registry.register(VllmCollector(client, self._latencies, about.model))
