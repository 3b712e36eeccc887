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
from server.metrics.families import counter, each, gauge, info
from server.metrics.requests import HttpMetrics
from server.metrics.vllm_names import VllmCollector

MEMORY_GAUGES = {
    "total": "Bytes of memory of the machine, or of the container where its limit is lower",
    "available": "Bytes of memory that programs could still get without swapping",
}
Footprint = Callable[[int], int]
"""A function from the bytes of K and V to all bytes that the system charges this process for."""


class SystemCollector(Collector):
    """Collects the operating system's figures about this process and the machine's memory."""

    def __init__(self, client: ServingEngine, footprint: Footprint) -> None:
        self._client = client
        self._footprint = footprint
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        yield from self._of_process()
        yield from self._of_memory()

    def _of_process(self) -> Iterator[Metric]:
        process = self._process
        with process.oneshot():
            used, times = process.memory_info(), process.cpu_times()
            threads, started = process.num_threads(), process.create_time()
        yield gauge(
            "process_resident_memory_bytes", "Bytes of RAM that this process uses", used.rss
        )
        yield gauge(
            "process_virtual_memory_bytes",
            "Bytes of address space that this process has reserved, whether memory "
            "stands behind it or not",
            used.vms,
        )
        yield counter(
            "process_cpu_seconds",
            "Seconds of processor time that this process has used, user and system together",
            times.user + times.system,
        )
        yield gauge(
            "process_open_fds",
            "File descriptors, sockets included, that this process has open",
            process.num_fds(),
        )
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield gauge(
            "process_max_fds",
            "Largest number of file descriptors that this process may have open",
            limit,
        )
        yield gauge(
            "process_start_time_seconds",
            "Start time of this process in seconds since the Unix epoch",
            started,
        )
        yield gauge("process_threads", "Threads that this process runs", threads)
        kv = self._client.stats.kv
        yield gauge(
            "quire_process_footprint_bytes",
            "Bytes of memory that the operating system charges this process for, in RAM "
            "or swapped out",
            self._footprint(0 if kv is None else kv.committed_bytes),
        )

    def _of_memory(self) -> Iterator[Metric]:
        memory, swap = machine_memory(), psutil.swap_memory()
        yield from each(gauge, "system_memory_", MEMORY_GAUGES, memory, "_bytes")
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
    """The metric quire_info, with these fields as labels."""

    model: str = ""
    kv_backend: str = ""
    arithmetic: str = ""
    max_model_len: int = 32768

    def collect(self) -> Iterator[Metric]:
        labels = {
            "version": version("quire"),
            "model": self.model,
            "kv_backend": self.kv_backend,
            "arithmetic": self.arithmetic,
        }
        yield info(
            "quire_info",
            "Always 1; its labels name the version, the model, the KV cache backend "
            "and the arithmetic",
            labels,
        )


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
