import os
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.client import EngineClient
from engine.machine import MachineMemory
from engine.types import EngineStats
from server.metrics.registry import SystemCollector
from tests.server.harness import Engine
from tests.server.metrics.scraping import Samples, client_with, samples_of, value

MIB = 1024**2


def shown(client: EngineClient | None = None) -> Samples:
    registry = CollectorRegistry()
    registry.register(SystemCollector(client or client_with(), lambda heap_bytes: heap_bytes + 5))
    return samples_of(generate_latest(registry).decode())


def test_the_process_is_described_by_what_the_system_knows() -> None:
    samples = shown()
    resident = value(samples, "process_resident_memory_bytes")
    assert MIB < resident < value(samples, "process_virtual_memory_bytes")
    assert 0 < value(samples, "process_cpu_seconds_total") < 1e6
    assert 0 < value(samples, "process_start_time_seconds") < time.time() + 60
    assert value(samples, "process_threads") >= threading.active_count()


def test_a_file_that_is_opened_counts() -> None:
    before = shown()
    file = os.open(os.devnull, os.O_RDONLY)
    assert value(shown(), "process_open_fds") == value(before, "process_open_fds") + 1
    os.close(file)
    assert value(before, "process_open_fds") < value(before, "process_max_fds")


def test_the_footprint_is_told_what_k_and_v_are_charged(engine: Engine) -> None:
    kv = engine.client.stats.kv
    assert kv is not None
    samples = shown(client_with(EngineStats(kv=kv)))
    assert value(samples, "quire_process_footprint_bytes") == kv.committed_bytes + 5
    assert value(shown(), "quire_process_footprint_bytes") == 5


@pytest.mark.parametrize("level", [0, 1, 2])
def test_memory_is_shown_as_the_system_has_it(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(64, 40)
    monkeypatch.setattr("server.metrics.registry.machine_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=3))
    samples = shown(client_with(pressure=level))
    assert value(samples, "quire_system_memory_total_bytes") == 64
    assert value(samples, "quire_system_memory_available_bytes") == 40
    assert value(samples, "quire_system_swap_used_bytes") == 3
    assert value(samples, "quire_memory_pressure_level") == level


def test_the_system_of_this_machine_can_be_asked() -> None:
    samples = shown()
    available = value(samples, "quire_system_memory_available_bytes")
    assert 0 < available <= value(samples, "quire_system_memory_total_bytes")
