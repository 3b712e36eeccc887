import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine import machine as module
from engine.machine import (
    GPU_HEADROOM_BYTES,
    MACOS_AVAILABLE,
    MAX_THREADS,
    SYSCTL,
    GroupMemory,
    MachineMemory,
    PressureLevel,
    gpu_memory,
    machine_memory,
    machine_threads,
    memory_of_groups,
    memory_pressure,
    own_groups,
    processors_of_groups,
    read_sysctl,
    release_free_memory,
    use_one_arena,
)
from tests.metal_ext.programs import output_of

GIB = 1024**3


NORMAL, WARNING, CRITICAL = PressureLevel
PSI = "some avg10={} avg60=99.00 avg300=99.00 total=1\nfull avg10=99.00 avg60=0.00 total=1\n"
UNLIMITED = 2**63 - 4096
# Of a process, as a system that has both versions of groups tells it.
BOTH = "9:name=systemd:/\n4:memory:/pod/box\n2:cpu,cpuacct:/pod\n0::/slice/own\n"


class Linux:
    """Folders that look like those of a system with groups of processes."""

    def __init__(self, folder: Path) -> None:
        self.mounts, self.proc = folder / "groups", folder / "proc"
        self.own = self.proc / "self/cgroup"
        self.say_own(BOTH)

    def say_own(self, text: str) -> None:
        """What groups the process is in."""
        self.own.parent.mkdir(parents=True, exist_ok=True)
        self.own.write_text(text)

    def write(self, folder: str, **files: object) -> None:
        """Files of a group; a double underscore for their dots."""
        place = self.mounts / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(f"{text}\n")

    def limit(self, folder: str, limit: object, used: int, stat: str = "") -> None:
        """Version 2's memory of a group."""
        self.write(folder, memory__max=limit, memory__current=used, memory__stat=stat)

    def limit_old(self, folder: str, limit: int, used: int, stat: str = "") -> None:
        """Version 1's memory of a group."""
        self.write(
            folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat
        )

    def stalls(self, percent: object) -> None:
        (self.proc / "pressure").mkdir(exist_ok=True)
        (self.proc / "pressure/memory").write_text(PSI.format(percent))


def total_and_available() -> tuple[int, int]:
    memory = machine_memory()
    return memory.total_bytes, memory.available_bytes


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linux:
    made = Linux(tmp_path)
    monkeypatch.setattr(module, "CONTROL_GROUPS", made.mounts)
    monkeypatch.setattr(module, "PROC", made.proc)
    return made


def test_a_container_has_its_own_limits_or_those_around_it(linux: Linux) -> None:
    linux.limit("slice/own", "max", 5)
    linux.limit("slice", GIB, GIB // 4)
    assert total_and_available() == (GIB, GIB * 3 // 4)
    linux.limit("slice/own", GIB // 2, GIB)
    assert total_and_available() == (GIB // 2, 0)


@pytest.mark.parametrize("old", [False, True])
def test_a_container_sees_its_own_group_as_the_root(linux: Linux, old: bool) -> None:
    # Its path is the host's: no such folder is there inside of the container.
    linux.say_own("4:memory:/docker/1f\n0::/\n")
    if old:
        linux.limit_old("memory", GIB, GIB // 8)
    else:
        linux.limit("", GIB, GIB // 8)
    assert total_and_available() == (GIB, GIB * 7 // 8)


def test_without_limits_the_machine_counts(linux: Linux) -> None:
    machine = psutil.virtual_memory().total
    linux.limit("slice/own", 1 << 60, 0)
    assert total_and_available()[0] == machine
    linux.say_own("4:memory:/old\n")
    assert total_and_available()[0] == machine
    linux.own.unlink()
    assert total_and_available()[0] == machine


def test_threads_are_the_processors_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, linux: Linux
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert machine_threads() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(384)), raising=False)
    assert machine_threads() == MAX_THREADS
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert machine_threads() == 7


@pytest.mark.parametrize(("share", "threads"), [("250", 3), ("10", 1), ("900", 7), ("max", 7)])
def test_threads_are_no_more_than_a_containers_share_of_processors(
    monkeypatch: pytest.MonkeyPatch, linux: Linux, share: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    linux.write("slice", cpu__max=f"{share} 100")
    assert machine_threads() == threads


@pytest.mark.parametrize(("available", "told"), [(20 * GIB, 12 * GIB), (5 * GIB, 5 * GIB)])
def test_a_gpu_may_use_what_its_driver_recommends_whatever_is_available(
    available: int, told: int
) -> None:
    memory = gpu_memory(MachineMemory(18 * GIB, available), 12 * GIB, 9 * GIB)
    assert memory == MachineMemory(12 * GIB, told, 9 * GIB, on_gpu=True)
    assert memory.usable_bytes(2 * GIB) == 10 * GIB


def test_a_cpu_may_use_what_is_available() -> None:
    assert MachineMemory(18 * GIB, 5 * GIB).usable_bytes(2 * GIB) == 5 * GIB
    assert MachineMemory(18 * GIB, 17 * GIB).usable_bytes(2 * GIB) == 16 * GIB


def test_a_fifth_or_a_gpus_headroom_is_left_to_others_unless_told_otherwise() -> None:
    machine = MachineMemory(10 * GIB, 10 * GIB)
    gpu = gpu_memory(machine, 6 * GIB)
    assert machine.headroom_bytes(None) == 2 * GIB
    assert gpu.headroom_bytes(None) == GPU_HEADROOM_BYTES == 1.5 * GIB
    for memory in (machine, gpu):
        assert memory.headroom_bytes(GIB) == GIB
        assert memory.headroom_bytes(0) == 0


def test_macos_can_give_what_activity_monitor_does_not_call_used(
    linux: Linux, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a Mac with 24 GiB, as vm_stat had them (pull request 4876 of HMCL): 3857 are free,
    294894 are of files, 17340 are purgeable. psutil would count 7.0 GiB, 2.2 of them others'."""
    pages = dict(zip(MACOS_AVAILABLE, (3857, 294894, 17340), strict=True))
    monkeypatch.setattr(module, "read_sysctl", pages.get)
    found = machine_memory()
    assert found.available_bytes == 316091 * os.sysconf("SC_PAGE_SIZE")
    assert found.total_bytes == psutil.virtual_memory().total


def test_a_system_that_does_not_count_all_of_them_is_asked_by_psutil(
    linux: Linux, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_sysctl", {MACOS_AVAILABLE[0]: 1 << 60}.get)
    assert machine_memory().available_bytes <= psutil.virtual_memory().total


# Small pieces of many threads, and one behind each that stays.
PROGRAM = """
import gc, threading, psutil
from engine.machine import release_free_memory

def crowd():
    taken = [bytes(3000) for _ in range(20_000)]
    kept.append(bytes(3000))

kept = []
threads = [threading.Thread(target=crowd) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
before = psutil.Process().memory_info().rss
release_free_memory()
print(before - psutil.Process().memory_info().rss)
"""

# Threads that allocate at the same time; then glibc prints each of its arenas.
ARENAS = """
import ctypes, threading
from engine.machine import use_one_arena

def crowd():
    together.wait()
    taken = [bytes(3000) for _ in range(1000)]
    together.wait()

use_one_arena()
together = threading.Barrier(4)
threads = [threading.Thread(target=crowd) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.fdopen.restype = ctypes.c_void_p
output = ctypes.c_void_p(library.fdopen(1, b"w"))
library.malloc_info(0, output)
library.fflush(output)
"""

# Arrays of steps, and a few between them that stay.
STEP = """
import mlx.core as mx
import psutil
from engine.machine import use_one_arena
from engine.step.runner import ModelRunner

use_one_arena()
mx.set_default_device(mx.cpu)
runner = ModelRunner(None, None)
taken = [mx.full(50_000, 1.0) for _ in range(500)]
mx.eval(taken)
kept = taken[::50]
del taken
before = psutil.Process().memory_info().rss
runner.release_cache()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_was_free_within_the_process_is_the_systems_afterwards() -> None:
    assert int(output_of(PROGRAM)) > 50 * 1024**2, "of 240 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_steps_took_is_the_systems_when_the_engine_releases_its_caches() -> None:
    assert int(output_of(STEP)) > 80 * 1024**2, "of 95 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="for glibc")
@pytest.mark.parametrize(("users", "several"), [(None, False), ("8", True)])
def test_threads_share_one_arena_unless_the_user_wants_more(
    monkeypatch: pytest.MonkeyPatch, users: str | None, several: bool
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if users:
        monkeypatch.setenv("MALLOC_ARENA_MAX", users)
    assert (output_of(ARENAS).count("<heap nr=") > 1) == several


@pytest.mark.parametrize("names", [["mallopt"], []])
def test_only_glibc_is_told_of_arenas(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    told: list[tuple[int, ...]] = []
    calls = {name: lambda *how: told.append(how) for name in names}
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**calls))
    use_one_arena()
    assert told == [(-8, 1)] * len(names)


@pytest.mark.parametrize("names", [["malloc_trim"], ["malloc_zone_pressure_relief"], []])
def test_each_library_is_asked_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    asked: list[str] = []
    calls = {name: lambda *_, name=name: asked.append(name) for name in names}
    library: Any = SimpleNamespace(**calls)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    release_free_memory()
    assert asked == names


@pytest.fixture
def machine(linux: Linux, monkeypatch: pytest.MonkeyPatch) -> Linux:
    memory = SimpleNamespace(total=1000, available=900)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return linux


def test_a_system_that_says_nothing_is_not_short(machine: Linux) -> None:
    assert memory_pressure() is NORMAL
    machine.own.unlink()
    assert memory_pressure() is NORMAL


@pytest.mark.parametrize(
    ("percent", "level"), [("0.00", NORMAL), ("9.99", NORMAL), ("10.00", WARNING), (40.5, CRITICAL)]
)
def test_tasks_that_wait_for_memory_tell(
    machine: Linux, percent: object, level: PressureLevel
) -> None:
    machine.stalls(percent)
    assert memory_pressure() is level


@pytest.mark.parametrize("text", ["", "\n", "full avg10=99.00 avg60=0.00\n", "some avg10=? x\n"])
def test_a_file_without_its_figure_says_nothing(machine: Linux, text: str) -> None:
    machine.stalls("41.00")
    (machine.proc / "pressure/memory").write_text(text)
    assert memory_pressure() is NORMAL


@pytest.mark.parametrize(
    ("used", "level"), [(89, NORMAL), (90, WARNING), (96, WARNING), (97, CRITICAL)]
)
def test_a_group_that_is_almost_full_is_short(
    machine: Linux, used: int, level: PressureLevel
) -> None:
    machine.limit("slice/own", 100, used)
    assert memory_pressure() is level


def test_an_old_group_that_is_almost_full_is_short(machine: Linux) -> None:
    machine.limit_old("memory/pod/box", 100, 95)
    assert memory_pressure() is WARNING
    machine.limit_old("memory/pod/box", 100, 95, "total_inactive_file 10")
    assert memory_pressure() is NORMAL


def test_page_cache_of_a_group_makes_room_and_shared_memory_does_not(machine: Linux) -> None:
    machine.limit("slice/own", 100, 99, "file 50\nshmem 0")
    assert memory_pressure() is NORMAL
    machine.limit("slice/own", 100, 99, "file 50\nshmem 50")
    assert memory_pressure() is CRITICAL


def test_a_group_without_a_limit_is_not_short_but_may_stall(machine: Linux) -> None:
    machine.limit("slice/own", "max", 99)
    assert memory_pressure() is NORMAL
    machine.write("slice/own", memory__pressure=PSI.format("15.00"))
    assert memory_pressure() is WARNING


def test_the_worst_of_all_counts(machine: Linux) -> None:
    machine.stalls("15.00")
    machine.limit("slice/own", 100, 50)
    machine.write("", memory__pressure=PSI.format("41.00"))
    assert memory_pressure() is CRITICAL


@pytest.mark.parametrize(
    ("available", "level"), [(51, NORMAL), (50, WARNING), (20, CRITICAL), (0, CRITICAL)]
)
def test_where_stalls_are_not_measured_what_is_left_tells(
    machine: Linux, monkeypatch: pytest.MonkeyPatch, available: int, level: PressureLevel
) -> None:
    memory = SimpleNamespace(total=1000, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert memory_pressure() is level
    machine.stalls("0.00")
    assert memory_pressure() is NORMAL


@pytest.mark.parametrize(
    ("said", "level"),
    [(1, NORMAL), (2, WARNING), (4, CRITICAL), (0, NORMAL), (3, NORMAL), (None, NORMAL)],
)
def test_macos_says_it_in_one_number(
    said: int | None, level: PressureLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(module, "read_sysctl", {SYSCTL: said}.__getitem__)
    assert memory_pressure() is level


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


def test_each_controller_of_version_1_has_a_tree_of_its_own(linux: Linux) -> None:
    at = linux.mounts
    found = {name: own_groups(name) for name in ("", "memory", "cpu", "blkio")}
    assert found == {
        "": [at / "slice/own", at / "slice", at],
        "memory": [at / "memory/pod/box", at / "memory/pod", at / "memory"],
        "cpu": [at / "cpu/pod", at / "cpu"],
        "blkio": [],
    }


def test_version_1_tells_limits_of_groups_that_cannot_be_seen(linux: Linux) -> None:
    stat = f"cache 5\nhierarchical_memory_limit {500}\n"
    linux.limit_old("memory/pod/box", UNLIMITED, 300, stat)
    assert memory_of_groups() == [GroupMemory(500, 300, 0)]


def test_page_cache_of_version_1_makes_room_with_that_of_the_groups_inside(linux: Linux) -> None:
    # cache has shared memory in it; the lists of files have not.
    stat = "cache 9\nactive_file 1\ntotal_cache 90\ntotal_active_file 20\ntotal_inactive_file 10\n"
    linux.limit_old("memory/pod/box", 700, 300, stat)
    assert memory_of_groups() == [GroupMemory(700, 300, 30)]


@pytest.mark.parametrize(
    ("told", "processors"),
    [
        ({"cpu/pod": {"cpu__cfs_quota_us": 150000, "cpu__cfs_period_us": 100000}}, 1.5),
        ({"cpu/pod": {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}}, None),
        ({"slice/own": {"cpu__max": "25000 50000"}}, 0.5),
        ({"slice/own": {"cpu__max": "max 100000"}}, None),
        ({"slice/own": {"cpu__max": "max 1"}, "slice": {"cpu__max": "300000 100000"}}, 3.0),
        (
            {
                "slice": {"cpu__max": "300000 100000"},
                "cpu": {"cpu__cfs_quota_us": 200000, "cpu__cfs_period_us": 100000},
            },
            2.0,
        ),
    ],
)
def test_the_least_share_of_processors_counts(
    linux: Linux, told: dict[str, dict[str, object]], processors: float | None
) -> None:
    for folder, files in told.items():
        linux.write(folder, **files)
    assert processors_of_groups() == processors
