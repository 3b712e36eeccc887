"""The machine's memory."""

from collections.abc import Callable, Iterator

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.serving import ServingEngine
from server.metrics.families import gauge

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
