"""Reads how much memory, processor time and how many open files the process may use here, and how
short of memory the system is. A limit that cannot be read does not count."""

import ctypes
import math
import os
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import psutil

from kvcache.memory_budget import usable_bytes

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
VERSION_2 = ""


PROC = Path("/proc")
SYSCTL = b"kern.memorystatus_vm_pressure_level"
# Percent of the last ten seconds in which some task waited for memory.
STALLED_WARNING, STALLED_CRITICAL = 10.0, 40.0
# Share of a group's limit that is used by other than page cache, which would make room.
USED_WARNING, USED_CRITICAL = 0.90, 0.97
# Share of the machine's memory that is available, on kernels that do not measure stalls.
AVAILABLE_WARNING, AVAILABLE_CRITICAL = 0.05, 0.02

MAX_THREADS = 256
# The usual headroom for other programs: a fifth of a machine's memory; less of a GPU's working set,
# which leaves them a quarter or a third of the memory already.
HEADROOM_PART = 5
GPU_HEADROOM_BYTES = 3 * 1024**3 // 2
# Pages of macOS that are available without compressing or swapping programs' memory: free pages,
# pages of files, and pages that their owners have given up (bsd/vm/vm_unix.c of XNU). Activity
# Monitor does not call them used.
MACOS_AVAILABLE = (
    b"vm.page_free_count",
    b"vm.page_pageable_external_count",
    b"vm.page_purgeable_count",
)

Sysctl = Callable[[bytes], int | None]
PressureSource = Callable[[], int]


def read_sysctl(name: bytes) -> int | None:
    """Return an integer of the kernel; None where this system has none of that name."""
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
    """Bytes of memory: all of it, and the part that no program uses now."""

    total_bytes: int
    available_bytes: int
    max_buffer_bytes: int | None = None
    """The largest allocation of the GPU; None on a CPU."""
    on_gpu: bool = False

    def headroom_bytes(self, setting: int | None) -> int:
        """Return the bytes that are left to other programs: as configured, or the usual ones."""
        usual = GPU_HEADROOM_BYTES if self.on_gpu else self.total_bytes // HEADROOM_PART
        return usual if setting is None else setting

    def usable_bytes(self, headroom_bytes: int) -> int:
        return usable_bytes(
            self.total_bytes, self.available_bytes, headroom_bytes, on_gpu=self.on_gpu
        )


def machine_memory(
    groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP, sysctl: Sysctl = read_sysctl
) -> MachineMemory:
    """Return the machine's memory, or the container's where that is less.

    Shared memory is charged to a control group like any other: beyond its limit the process is
    killed.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, macos_available_bytes(sysctl)
    if available is None:
        available = memory.available
    for group in memory_of_groups(groups, own):
        left = group.limit_bytes - group.used_bytes + group.reclaimable_bytes
        total = min(total, group.limit_bytes)
        available = min(available, max(0, left))
    return MachineMemory(total, available)


def macos_available_bytes(sysctl: Sysctl) -> int | None:
    """Return the bytes that macOS could give without taking them from a program; None on another
    system.

    psutil counts free and inactive pages there: some of these are memory of programs, and pages of
    files that were read lately are missing.
    """
    counts = [sysctl(name) for name in MACOS_AVAILABLE]
    pages = [count for count in counts if count is not None]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if len(pages) == len(counts) else None


def gpu_memory(
    machine: MachineMemory, working_set_bytes: int, max_buffer_bytes: int | None = None
) -> MachineMemory:
    """Return the part of the machine's memory that a GPU may use: the working set that its driver
    recommends."""
    total = min(machine.total_bytes, working_set_bytes)
    available = min(machine.available_bytes, working_set_bytes)
    return MachineMemory(total, available, max_buffer_bytes, on_gpu=True)


def machine_threads(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> int:
    """Return how many processors this process may run on, as far as they can be used.

    A container's share of their time is rounded up, as Go and Java do it. More threads would use
    it up in the first part of each period, and all stand still for the rest.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    share = processors_of_groups(groups, own)
    if share is not None:
        count = min(count, max(1, math.ceil(share)))
    return min(MAX_THREADS, count)


def raise_descriptor_limit() -> int:
    """Raise this process's limit as far as the system lets it. Never fails. Return what it is now.

    The hard limit may be out of reach. A Mac's is infinite, and setrlimit(2) refuses infinity and
    all beyond kern.maxfilesperproc: then bisection finds the largest limit that is not refused.
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

# Linux has two versions, and a system may have both. Version 2:
# docs.kernel.org/admin-guide/cgroup-v2.html. Version 1:
# docs.kernel.org/admin-guide/cgroup-v1/memory.html and docs.kernel.org/scheduler/sched-bwc.html.


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A group that has a limit. Bytes."""

    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int
    """The part of the used bytes that is page cache, without shared memory, which the kernel counts
    among the files."""


def own_groups(groups: Path, own: Path, controller: str = VERSION_2) -> list[Path]:
    """Return the process's group and those around it; each may have a limit.

    controller: of version 1, which has a tree of groups for each. own: with lines such as
    ``4:memory:/docker/1f`` and ``0::/slice/own``.
    """
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            tree = groups / controller
            folder = tree / path.lstrip("/")
            return [folder, *(parent for parent in folder.parents if parent.is_relative_to(tree))]
    return []


def memory_of_groups(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> list[GroupMemory]:
    """Return all that limit the process's memory."""
    limits = [_version_2(folder) for folder in own_groups(groups, own)]
    limits += [_version_1(folder) for folder in own_groups(groups, own, "memory")]
    return [memory for memory in limits if memory is not None]


def _version_2(folder: Path) -> GroupMemory | None:
    limit, used = (_integer(folder / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    stat = _figures(folder / "memory.stat")
    return GroupMemory(limit, used, max(0, stat.get("file", 0) - stat.get("shmem", 0)))


def _version_1(folder: Path) -> GroupMemory | None:
    """Return a group's memory. Without a limit the kernel reports one of almost 2^63 bytes."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (_integer(folder / name) for name in names)
    if limit is None or used is None:
        return None
    stat = _figures(folder / "memory.stat")
    # A container does not see the groups around its own; this file shows the least of their limits.
    limit = min(limit, stat.get("hierarchical_memory_limit", limit))
    cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
    return GroupMemory(limit, used, cache)


def processors_of_groups(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> float | None:
    """Return how many processors' time the process may use; None where there is no limit."""
    quotas = [_text(folder / "cpu.max").split() for folder in own_groups(groups, own)]
    quotas += [
        [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for folder in own_groups(groups, own, "cpu")
    ]
    # "max", -1 or nothing at all where there is no quota.
    return min(
        (int(words[0]) / int(words[1]) for words in quotas if words and words[0].isdecimal()),
        default=None,
    )


def _figures(file: Path) -> dict[str, int]:
    """Return the numbers of a file, by the name in front of each."""
    lines = (line.split() for line in _text(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _integer(file: Path) -> int | None:
    """Return the number; None where there is no such file, or "max" in it."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


# --- memory pressure ------------------------------------------------------------------------------

# macOS has one number for it. Linux measures how long tasks wait for memory
# (docs.kernel.org/accounting/psi.html) and charges control groups for what they use.


class PressureLevel(IntEnum):
    """How short of memory the system is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


# kern.memorystatus_vm_pressure_level, as in XNU's osfmk/vm/vm_pageout.h.
MACOS_LEVELS = {1: PressureLevel.NORMAL, 2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}


def pressure_source(platform: str = sys.platform) -> PressureSource:
    return macos_pressure if platform == "darwin" else linux_pressure


def macos_pressure(sysctl: Sysctl | None = None) -> PressureLevel:
    """Return the level that the kernel tells programs."""
    return MACOS_LEVELS.get((sysctl or read_sysctl)(SYSCTL) or 0, PressureLevel.NORMAL)


def linux_pressure(proc: Path = PROC, groups: Path = CONTROL_GROUPS) -> PressureLevel:
    """Return the worst level of the machine and of the process's control groups."""
    own = proc / "self/cgroup"
    stalls = [proc / "pressure/memory"]
    stalls += [folder / "memory.pressure" for folder in own_groups(groups, own)]
    levels = [_stalled(file) for file in stalls]
    levels += [_used(group) for group in memory_of_groups(groups, own)]
    if not stalls[0].exists():
        memory = psutil.virtual_memory()
        used = 1 - memory.available / memory.total
        levels.append(_level(used, 1 - AVAILABLE_WARNING, 1 - AVAILABLE_CRITICAL))
    return max(levels)


def _stalled(file: Path) -> PressureLevel:
    """Return the level of the line ``some avg10=0.00 avg60=...``."""
    stalled = re.search(r"^some avg10=([\d.]+)", _text(file), re.MULTILINE)
    return _level(float(stalled[1]) if stalled else 0.0, STALLED_WARNING, STALLED_CRITICAL)


def _used(group: GroupMemory) -> PressureLevel:
    """Return the level of the memory that a group is charged with and cannot reclaim."""
    needed = group.used_bytes - group.reclaimable_bytes
    return _level(needed / max(1, group.limit_bytes), USED_WARNING, USED_CRITICAL)


def _level(value: float, warning: float, critical: float) -> PressureLevel:
    if value >= critical:
        return PressureLevel.CRITICAL
    return PressureLevel.WARNING if value >= warning else PressureLevel.NORMAL


# --- the C library's memory -----------------------------------------------------------------------

# The C library keeps freed memory in pieces, which after many requests or a long prompt may be
# hundreds of MiB. It gives back whole pages only, so the pieces should lie together.

# From glibc's malloc.h; and the variable by which a user decides it.
M_ARENA_MAX, ARENA_MAX_VARIABLE = -8, "MALLOC_ARENA_MAX"


def use_one_arena() -> None:
    """Let all threads take memory from one place, unless the user has said otherwise.

    glibc gives each thread an arena of its own, and each arena is fragmented: together they held
    three times as much. Few threads here allocate at the same time. Call this before they start.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and ARENA_MAX_VARIABLE not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Let the C library give its freed memory back; musl's keeps little by itself."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
