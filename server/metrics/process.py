"""This process, under the names that Prometheus' own clients use, on every system.
https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
"""

import resource
from collections.abc import Callable, Iterator

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from server.metrics.families import counter, gauge

Footprint = Callable[[int], int]
"""What the system charges this process for, given the bytes of K and V that it charges for."""


class ProcessCollector(Collector):
    """Collect what the system says of this process."""

    def __init__(self, client: ServingEngine, footprint: Footprint) -> None:
        self._client = client
        self._footprint = footprint
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        process = self._process
        with process.oneshot():
            memory, times = process.memory_info(), process.cpu_times()
            threads, started = process.num_threads(), process.create_time()
        yield gauge(
            "process_resident_memory_bytes", "Bytes of RAM that this process uses", memory.rss
        )
        yield gauge(
            "process_virtual_memory_bytes",
            "Bytes of address space that this process has reserved, whether memory "
            "stands behind it or not",
            memory.vms,
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
