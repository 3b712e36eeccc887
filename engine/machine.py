"""Reads the process's limits of memory, processors and open files, and the system's memory
pressure. Limits that cannot be read are ignored."""

import ctypes
import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from kvcache.budget import usable_bytes

CONTROL_GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
SYSCTL = b"kern.memorystatus_vm_pressure_level"
# Memory pressure begins if tasks waited for memory during this percentage of the last ten seconds.
STALLED_WARNING, STALLED_CRITICAL = 10.0, 40.0
# Memory pressure begins at this fraction of a control group's limit. Page cache does not count.
USED_WARNING, USED_CRITICAL = 0.90, 0.97
# If waits are not measured, pressure begins if at most this fraction of memory is available.
AVAILABLE_WARNING, AVAILABLE_CRITICAL = 0.05, 0.02

MAX_THREADS = 256
# By default, 1 / HEADROOM_PART of the machine's memory is left to other programs. On a GPU
# less is left, because macOS already keeps a quarter to a third of the memory from the GPU.
HEADROOM_PART = 5
GPU_HEADROOM_BYTES = 3 * 1024**3 // 2
# The names of the kernel's counts of pages that macOS can hand out without compressing or swapping:
# free pages, file pages, and purgeable pages (XNU, bsd/vm/vm_unix.c).
MACOS_AVAILABLE = (
    b"vm.page_free_count",
    b"vm.page_pageable_external_count",
    b"vm.page_purgeable_count",
)


def read_sysctl(name: bytes) -> int | None:
    """Return an integer that the kernel publishes, or None if the name is unknown."""
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return None
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = call(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


# --- memory and processors ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The memory of a machine or its GPU, and the part that is free now."""

    total_bytes: int
    available_bytes: int
    max_buffer_bytes: int | None = None
    """The largest single allocation of the GPU; None on a CPU."""
    on_gpu: bool = False
    address_bytes: int | None = None
    """The addresses that a process has on the GPU; None on a CPU."""

    def headroom_bytes(self, setting: int | None) -> int:
        """Return the bytes to leave to other programs: ``setting``, or a default if it is None."""
        usual = GPU_HEADROOM_BYTES if self.on_gpu else self.total_bytes // HEADROOM_PART
        return usual if setting is None else setting

    def usable_bytes(self, headroom_bytes: int) -> int:
        return usable_bytes(
            self.total_bytes, self.available_bytes, headroom_bytes, on_gpu=self.on_gpu
        )


def machine_memory() -> MachineMemory:
    """Return the memory of the machine, or of this process's container if that has less."""
    memory = psutil.virtual_memory()
    total, available = memory.total, macos_available_bytes()
    if available is None:
        available = memory.available
    for group in memory_of_groups():
        left = group.limit_bytes - group.used_bytes + group.reclaimable_bytes
        total = min(total, group.limit_bytes)
        available = min(available, max(0, left))
    return MachineMemory(total, available)


def macos_available_bytes() -> int | None:
    """Return the bytes of the pages in MACOS_AVAILABLE, or None on other systems. (psutil's number
    is not used: it includes some pages in use, and lacks the pages of recently read files.)"""
    counts = [read_sysctl(name) for name in MACOS_AVAILABLE]
    pages = [count for count in counts if count is not None]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if len(pages) == len(counts) else None


def gpu_memory(
    machine: MachineMemory,
    working_set_bytes: int,
    max_buffer_bytes: int | None = None,
    address_bytes: int | None = None,
) -> MachineMemory:
    """Return the memory that a GPU may use, at most the driver's limit ``working_set_bytes``."""
    total = min(machine.total_bytes, working_set_bytes)
    available = min(machine.available_bytes, working_set_bytes)
    return MachineMemory(total, available, max_buffer_bytes, True, address_bytes)


def machine_threads() -> int:
    """Return the number of processors that this process can keep busy.

    A container's quota of processor time is rounded up to whole processors. With more threads, the
    quota would be used up early in each period, and all threads would stop until the period ends.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    share = processors_of_groups()
    if share is not None:
        count = min(count, max(1, math.ceil(share)))
    return min(MAX_THREADS, count)


def raise_descriptor_limit() -> int:
    """Raise the process's limit of open files as far as the system allows. Return the new limit.

    macOS reports an infinite hard limit, but refuses more than kern.maxfilesperproc. So a bisection
    finds the largest value that the system accepts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed, refused = _finite(soft), _finite(hard) + 1
    limit = refused - 1
    while allowed < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            allowed = limit
        except (ValueError, OSError):
            refused = limit
        limit = (allowed + refused) // 2
    return allowed


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


# --- control groups -------------------------------------------------------------------------------

# Control groups limit containers on Linux. There are two versions, and a system may use both.
# Version 2: docs.kernel.org/admin-guide/cgroup-v2.html. Version 1:
# docs.kernel.org/admin-guide/cgroup-v1/memory.html and docs.kernel.org/scheduler/sched-bwc.html.
VERSION_1_NAMES = "limit_in_bytes", "usage_in_bytes"


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The memory of a control group that has a limit."""

    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int
    """The used bytes that the kernel can free, which are page cache except shared memory."""


def own_groups(controller: str = "") -> list[Path]:
    """Return the folders of the process's control group and of all groups around that group.

    The process's file has lines such as ``4:memory:/docker/1f`` or ``0::/slice/own``.
    ``controller`` names one tree of groups in version 1, for example "memory"; "" is version 2.
    """
    for line in _text(PROC / "self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            tree = CONTROL_GROUPS / controller
            folder = tree / path.lstrip("/")
            return [folder, *(parent for parent in folder.parents if parent.is_relative_to(tree))]
    return []


def memory_of_groups() -> list[GroupMemory]:
    """Return the memory of each control group that limits this process's memory."""
    return [*_read_memory("", "max", "current"), *_read_memory("memory", *VERSION_1_NAMES)]


def _read_memory(controller: str, limit_name: str, used_name: str) -> Iterator[GroupMemory]:
    for folder in own_groups(controller):
        limit, used = (_integer(folder / f"memory.{name}") for name in (limit_name, used_name))
        if limit is None or used is None:
            continue
        stat = _figures(folder / "memory.stat")
        # In version 1, a group without a limit has one of almost 2^63 bytes. A container cannot
        # read the groups around its own, but this field has the least of all limits.
        limit = min(limit, stat.get("hierarchical_memory_limit", limit))
        # The page cache is the first line in version 2, and the second line in version 1.
        cache = max(0, stat.get("file", 0) - stat.get("shmem", 0))
        cache += stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
        yield GroupMemory(limit, used, cache)


def processors_of_groups() -> float | None:
    """Return the quota of processor time as a number of processors, or None without a quota."""
    quotas = [_text(folder / "cpu.max").split() for folder in own_groups()]
    quotas += [
        [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for folder in own_groups("cpu")
    ]
    # If there is no quota, the first word is "max" or -1, or the file does not exist.
    return min(
        (int(words[0]) / int(words[1]) for words in quotas if words and words[0].isdecimal()),
        default=None,
    )


def _figures(file: Path) -> dict[str, int]:
    """Parse a file with lines such as ``file 4096`` into a dict from names to numbers."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _integer(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


# --- memory pressure ------------------------------------------------------------------------------

# macOS publishes one number for memory pressure. Linux publishes the time in which tasks wait for
# memory (docs.kernel.org/accounting/psi.html), and the memory that each control group uses.


class PressureLevel(IntEnum):
    """The degree to which the system is short of memory."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


# The values of kern.memorystatus_vm_pressure_level, from XNU's osfmk/vm/vm_pageout.h.
MACOS_LEVELS = {1: PressureLevel.NORMAL, 2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}


def memory_pressure() -> PressureLevel:
    """Return the system's memory pressure: on Linux, the highest level of the machine and of the
    process's control groups."""
    if sys.platform == "darwin":
        return MACOS_LEVELS.get(read_sysctl(SYSCTL) or 0, PressureLevel.NORMAL)
    stalls = [PROC / "pressure/memory"]
    stalls += [folder / "memory.pressure" for folder in own_groups()]
    levels = [_stalled(file) for file in stalls]
    levels += [_used(group) for group in memory_of_groups()]
    if not stalls[0].exists():
        memory = psutil.virtual_memory()
        used = 1 - memory.available / memory.total
        levels.append(_level(used, 1 - AVAILABLE_WARNING, 1 - AVAILABLE_CRITICAL))
    return max(levels)


def _stalled(file: Path) -> PressureLevel:
    """Return the pressure level for a file with a line such as ``some avg10=0.00 avg60=...``."""
    stalled = re.search(r"^some avg10=([\d.]+)", _text(file), re.MULTILINE)
    return _level(float(stalled[1]) if stalled else 0.0, STALLED_WARNING, STALLED_CRITICAL)


def _used(group: GroupMemory) -> PressureLevel:
    needed = group.used_bytes - group.reclaimable_bytes
    return _level(needed / max(1, group.limit_bytes), USED_WARNING, USED_CRITICAL)


def _level(value: float, warning: float, critical: float) -> PressureLevel:
    if value >= critical:
        return PressureLevel.CRITICAL
    return PressureLevel.WARNING if value >= warning else PressureLevel.NORMAL


# --- the C library's memory -----------------------------------------------------------------------

# After a long prompt, the C library keeps hundreds of MiB of freed memory in small pieces. Only
# whole free pages return to the system. More pages are free if all threads share one arena (pool).

# glibc's option for the number of arenas (malloc.h), and the variable by which users set it.
M_ARENA_MAX, ARENA_MAX_VARIABLE = -8, "MALLOC_ARENA_MAX"


def use_one_arena() -> None:
    """Make glibc use one arena (pool of memory) for all threads, unless the user has set a number.
    Many arenas keep three times as much freed memory. Call this before any thread starts."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and ARENA_MAX_VARIABLE not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Return the C library's freed memory to the system (except with musl, which keeps little)."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
