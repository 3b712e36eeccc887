import mlx.core as mx
import pytest

from engine.planning.devices import CPU, DEVICES, find_device, this_device
from tests.engine.planning.test_capacity import chip


@pytest.mark.parametrize("name", ["M4 Pro", "m4-pro", "Apple M4 Pro"])
def test_a_device_is_found_however_it_is_written(name: str) -> None:
    assert chip(name).name == "M4 Pro"


def test_every_name_is_there_once_and_others_are_not() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    assert find_device("M4 Prodigy") is find_device("") is None


def test_estimated_rates_are_near_the_quoted_ones() -> None:
    """Teraflops that are widely quoted for the GPUs (float32)."""
    quoted = {"M1": 2.6, "M1 Max": 10.4, "M1 Ultra": 20.8, "M2": 3.6, "M2 Max": 13.6}
    for name, teraflops in quoted.items():
        assert chip(name).ops_per_s == pytest.approx(teraflops * 1e12, rel=0.03)


@pytest.mark.parametrize(
    ("memory_gib", "working_set_mib"),
    [(16, 10922), (24, 16384), (32, 21845), (36, 27648), (64, 49152), (96, 73728)],
)
def test_a_gpu_may_use_what_public_logs_show(memory_gib: int, working_set_mib: int) -> None:
    for device in DEVICES:
        found = device.with_memory(memory_gib << 30).working_set_bytes >> 20
        assert found == (memory_gib << 10 if device is CPU else working_set_mib)


@pytest.mark.parametrize(
    ("name", "memory_gib", "gigabytes_per_s"),
    [
        ("M5", 16, 153),
        ("M5 Pro", 48, 307),
        ("M5 Max", 36, 460),
        ("M5 Max", 128, 614),
        ("M5 Ultra", 256, 1200),
        ("M6", 16, 153),
        ("M6", 32, 170),
        ("M4 Max", 36, 410),
        ("M4 Max", 48, 546),
        ("M3 Max", 36, 300),
    ],
)
def test_a_mac_reads_as_fast_as_the_chip_that_comes_with_its_memory(
    name: str, memory_gib: int, gigabytes_per_s: int
) -> None:
    """Apple sells some memory sizes with a smaller chip of the same name only."""
    device = chip(name, memory_gib)
    assert (device.name, device.bytes_per_s) == (name, gigabytes_per_s * 1e9)
    assert device.ops_per_s <= chip(name).ops_per_s


def test_this_device_is_the_one_that_mlx_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M2 Max"})
    assert this_device().name == "M2 Max"
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Intel(R) Xeon(R) Processor"})
    assert this_device() is CPU
