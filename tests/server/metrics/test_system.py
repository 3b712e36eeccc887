from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.metrics.registry import SystemCollector, machine_alone
from tests.server.metrics.scraping import client_with, samples_of, value


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_machine_is_shown_as_the_system_has_it(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64, available=40))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=3))
    registry = CollectorRegistry()
    registry.register(SystemCollector(client_with(pressure=level), machine_alone))
    samples = samples_of(generate_latest(registry).decode())
    assert value(samples, "quire_system_memory_total_bytes") == 64
    assert value(samples, "quire_system_memory_available_bytes") == 40
    assert value(samples, "quire_system_swap_used_bytes") == 3
    assert value(samples, "quire_memory_pressure_level") == level


def test_the_system_of_this_machine_can_be_asked() -> None:
    registry = CollectorRegistry()
    registry.register(SystemCollector(client_with(), machine_alone))
    samples = samples_of(generate_latest(registry).decode())
    available = value(samples, "quire_system_memory_available_bytes")
    assert 0 < available <= value(samples, "quire_system_memory_total_bytes")


def test_a_container_is_shown_instead_of_the_machine_around_it() -> None:
    registry = CollectorRegistry()
    registry.register(SystemCollector(client_with(), lambda: (20, 7)))
    samples = samples_of(generate_latest(registry).decode())
    assert value(samples, "quire_system_memory_total_bytes") == 20
    assert value(samples, "quire_system_memory_available_bytes") == 7
