"""What systems say of their memory, from files and numbers of our own."""

import ctypes
from pathlib import Path

import pytest

from engine.pressure import (
    SYSCTL,
    PressureLevel,
    linux_pressure,
    macos_pressure,
    pressure_source,
    read_sysctl,
)

NORMAL, WARNING, CRITICAL = PressureLevel
PSI = "some avg10={} avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00 avg60=0.00 total=1\n"


class Machine:
    """Folders that look like those of Linux."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.groups = folder / "proc", folder / "groups"
        self.group = self.groups / "slice" / "own"

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def stalls(self, percent: object) -> None:
        self.write(self.proc / "pressure/memory", PSI.format(percent))

    def charge(self, current: int, limit: object, file: int = 0, shmem: int = 0) -> None:
        self.write(self.proc / "self/cgroup", "1:cpu:/other\n0::/slice/own\n")
        self.write(self.group / "memory.current", f"{current}\n")
        self.write(self.group / "memory.max", f"{limit}\n")
        self.write(self.group / "memory.stat", f"anon 5\nfile {file}\nshmem {shmem}\n")

    def read(self) -> PressureLevel:
        return linux_pressure(self.proc, self.groups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_system_that_says_nothing_is_not_short(machine: Machine) -> None:
    assert machine.read() is NORMAL


@pytest.mark.parametrize(
    ("percent", "level"), [("0.00", NORMAL), ("9.99", NORMAL), ("10.00", WARNING), (40.5, CRITICAL)]
)
def test_tasks_that_wait_for_memory_tell(
    machine: Machine, percent: object, level: PressureLevel
) -> None:
    machine.stalls(percent)
    assert machine.read() is level


@pytest.mark.parametrize("text", ["", "\n", "full avg10=99.00 avg60=0.00\n", "some avg10=? x\n"])
def test_a_file_without_its_figure_says_nothing(machine: Machine, text: str) -> None:
    machine.write(machine.proc / "pressure/memory", text)
    assert machine.read() is NORMAL


@pytest.mark.parametrize(
    ("used", "level"), [(89, NORMAL), (90, WARNING), (96, WARNING), (97, CRITICAL)]
)
def test_a_group_that_is_almost_full_is_short(
    machine: Machine, used: int, level: PressureLevel
) -> None:
    machine.charge(used, 100)
    assert machine.read() is level


def test_an_old_group_that_is_almost_full_is_short(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "4:memory:/own\n")
    group = machine.groups / "memory" / "own"
    machine.write(group / "memory.limit_in_bytes", "100\n")
    machine.write(group / "memory.usage_in_bytes", "95\n")
    assert machine.read() is WARNING
    machine.write(group / "memory.stat", "total_inactive_file 10\n")
    assert machine.read() is NORMAL


def test_page_cache_of_a_group_makes_room_and_shared_memory_does_not(machine: Machine) -> None:
    machine.charge(99, 100, file=50, shmem=0)
    assert machine.read() is NORMAL
    machine.charge(99, 100, file=50, shmem=50)
    assert machine.read() is CRITICAL


def test_a_group_without_a_limit_is_not_short_but_may_stall(machine: Machine) -> None:
    machine.charge(99, "max")
    assert machine.read() is NORMAL
    machine.write(machine.group / "memory.pressure", PSI.format("15.00"))
    assert machine.read() is WARNING


def test_the_worst_of_all_counts(machine: Machine) -> None:
    machine.stalls("15.00")
    machine.charge(50, 100)
    machine.write(machine.groups / "memory.pressure", PSI.format("41.00"))
    assert machine.read() is CRITICAL


@pytest.mark.parametrize(
    ("available", "level"), [(51, NORMAL), (50, WARNING), (20, CRITICAL), (0, CRITICAL)]
)
def test_where_stalls_are_not_measured_what_is_left_tells(
    machine: Machine, available: int, level: PressureLevel
) -> None:
    machine.write(
        machine.proc / "meminfo",
        f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n",
    )
    assert machine.read() is level
    machine.stalls("0.00")
    assert machine.read() is NORMAL


@pytest.mark.parametrize("text", ["", "MemTotal: 1000 kB\n", "MemTotal:\nMemAvailable: 1 kB\n"])
def test_a_count_of_memory_without_its_figures_says_nothing(machine: Machine, text: str) -> None:
    machine.write(machine.proc / "meminfo", text)
    assert machine.read() is NORMAL


@pytest.mark.parametrize(
    ("said", "level"),
    [(1, NORMAL), (2, WARNING), (4, CRITICAL), (0, NORMAL), (3, NORMAL), (None, NORMAL)],
)
def test_macos_says_it_in_one_number(said: int | None, level: PressureLevel) -> None:
    asked: list[bytes] = []

    def sysctl(name: bytes) -> int | None:
        asked.append(name)
        return said

    assert macos_pressure(sysctl) is level
    assert asked == [SYSCTL]


def test_the_kernel_is_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(name: bytes, value: object, size: object, new: object, new_size: object) -> int:
        if name != b"known":
            return -1
        value._obj.value = 4  # type: ignore[attr-defined]
        return 0

    class Library:
        def __init__(self, name: None) -> None:
            self.sysctlbyname = call

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert read_sysctl(b"known") == 4
    assert read_sysctl(b"unknown") is None
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert read_sysctl(b"known") is None


def test_every_system_has_its_source() -> None:
    assert pressure_source("darwin") is macos_pressure
    assert pressure_source("linux") is linux_pressure
    assert PressureLevel(pressure_source()()) in PressureLevel
