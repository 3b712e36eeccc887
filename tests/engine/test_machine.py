import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.machine import (
    GPU_HEADROOM_BYTES,
    MACOS_AVAILABLE,
    MAX_THREADS,
    MachineMemory,
    gpu_memory,
    machine_memory,
    machine_threads,
    release_free_memory,
    use_one_arena,
)

GIB = 1024**3


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    (folder / "pod" / "box").mkdir(parents=True)
    (tmp_path / "own").write_text("12:devices:/elsewhere\n0::/pod/box\n")
    return folder


def limit(folder: Path, most: str, used: int) -> None:
    (folder / "memory.max").write_text(most + "\n")
    (folder / "memory.current").write_text(f"{used}\n")


def test_a_container_has_its_own_limits_or_those_around_it(groups: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    limit(groups / "pod" / "box", "max", 5)
    limit(groups / "pod", str(GIB), GIB // 4)
    found = machine_memory(groups, own)
    assert (found.total_bytes, found.available_bytes) == (GIB, GIB * 3 // 4)
    limit(groups / "pod" / "box", str(GIB // 2), GIB)
    found = machine_memory(groups, own)
    assert (found.total_bytes, found.available_bytes) == (GIB // 2, 0)


def test_a_container_sees_its_own_group_as_the_root(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    limit(groups, str(GIB), GIB // 8)
    found = machine_memory(groups, tmp_path / "own")
    assert (found.total_bytes, found.available_bytes) == (GIB, GIB * 7 // 8)


def test_without_limits_the_machine_counts(groups: Path, tmp_path: Path) -> None:
    machine = psutil.virtual_memory().total
    limit(groups / "pod" / "box", str(1 << 60), 0)
    assert machine_memory(groups, tmp_path / "own").total_bytes == machine
    assert machine_memory(groups, tmp_path / "nothing").total_bytes == machine
    (tmp_path / "own").write_text("4:memory:/old\n")
    assert machine_memory(groups, tmp_path / "own").total_bytes == machine


def test_a_container_of_the_old_version_has_its_limit_too(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/1f\n0::/\n")
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text(f"{GIB // 4}\n")
    found = machine_memory(groups, tmp_path / "own")
    assert (found.total_bytes, found.available_bytes) == (GIB, GIB * 3 // 4)


def test_threads_are_the_processors_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, groups: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    own = tmp_path / "own"
    assert machine_threads(groups, own) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(384)), raising=False)
    assert machine_threads(groups, own) == MAX_THREADS
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert machine_threads(groups, own) == 7


@pytest.mark.parametrize(("share", "threads"), [("250", 3), ("10", 1), ("900", 7), ("max", 7)])
def test_threads_are_no_more_than_a_containers_share_of_processors(
    monkeypatch: pytest.MonkeyPatch, groups: Path, tmp_path: Path, share: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    (groups / "pod" / "cpu.max").write_text(f"{share} 100\n")
    assert machine_threads(groups, tmp_path / "own") == threads


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


def test_macos_can_give_what_activity_monitor_does_not_call_used(tmp_path: Path) -> None:
    """Pages of a Mac with 24 GiB, as vm_stat had them (pull request 4876 of HMCL): 3857 are free,
    294894 are of files, 17340 are purgeable. psutil would count 7.0 GiB, 2.2 of them others'."""
    pages = dict(zip(MACOS_AVAILABLE, (3857, 294894, 17340), strict=True))
    found = machine_memory(tmp_path, tmp_path / "own", pages.get)
    assert found.available_bytes == 316091 * os.sysconf("SC_PAGE_SIZE")
    assert found.total_bytes == psutil.virtual_memory().total


def test_a_system_that_does_not_count_all_of_them_is_asked_by_psutil(tmp_path: Path) -> None:
    free_alone = {MACOS_AVAILABLE[0]: 1 << 60}
    found = machine_memory(tmp_path, tmp_path / "own", free_alone.get)
    assert found.available_bytes <= psutil.virtual_memory().total


def test_page_cache_of_a_container_is_memory_that_can_be_had(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    limit(groups, str(GIB), GIB // 2)
    (groups / "memory.stat").write_text(f"anon 1\nfile {GIB // 4}\nshmem {GIB // 8}\n")
    assert machine_memory(groups, tmp_path / "own").available_bytes == GIB * 5 // 8
    (groups / "memory.stat").write_text("anon 1\n")
    assert machine_memory(groups, tmp_path / "own").available_bytes == GIB // 2


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
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) > 50 * 1024**2, "of 240 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="for glibc")
def test_what_steps_took_is_the_systems_when_the_engine_releases_its_caches() -> None:
    ended = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 80 * 1024**2, "of 95 MiB"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="for glibc")
@pytest.mark.parametrize(("users", "several"), [(None, False), ("8", True)])
def test_threads_share_one_arena_unless_the_user_wants_more(
    monkeypatch: pytest.MonkeyPatch, users: str | None, several: bool
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if users:
        monkeypatch.setenv("MALLOC_ARENA_MAX", users)
    ended = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    )
    assert (ended.stdout.count("<heap nr=") > 1) == several


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
