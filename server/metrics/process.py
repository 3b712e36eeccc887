"""This process, under the names that Prometheus' own clients use, on every system.
https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
"""

import resource
from collections.abc import Callable, Iterator

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.client import EngineClient
from server.metrics.families import counter, gauge

Footprint = Callable[[int], int]
"""What the system charges this process for, given the bytes of K and V that it charges for."""


class ProcessCollector(Collector):
    """What the system says of this process."""

    def __init__(self, client: EngineClient, footprint: Footprint) -> None:
        self._client = client
        self._footprint = footprint
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        process = self._process
        with process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            threads, started = process.num_threads(), process.create_time()
        yield gauge("process_resident_memory_bytes", "Memory in RAM", memory.rss)
        yield gauge("process_virtual_memory_bytes", "Addresses in use", memory.vms)
        yield counter("process_cpu_seconds", "Processor time", times.user + times.system)
        yield gauge("process_open_fds", "Open file descriptors", process.num_fds())
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield gauge("process_max_fds", "Most file descriptors that may be open", limit)
        yield gauge("process_start_time_seconds", "Start, in Unix time", started)
        yield gauge("process_threads", "Threads", threads)
        kv = self._client.stats.kv
        yield gauge(
            "quire_process_footprint_bytes",
            "Memory that the system charges the process for, in RAM or swapped out",
            self._footprint(0 if kv is None else kv.committed_bytes),
        )
