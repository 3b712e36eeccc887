"""How much of this machine the process may use: memory, processors and open files."""

import ctypes
import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.control_groups import (
    CONTROL_GROUPS,
    OWN_GROUP,
    memory_of_groups,
    processors_of_groups,
)
from engine.pressure import Sysctl, read_sysctl
from kvcache.memory_budget import usable_bytes

MAX_THREADS = 256
# What is left to other programs where nobody says how much: one part in so many of a machine's
# memory; so much of a GPU's working set, which leaves them a quarter or a third of it already.
HEADROOM_PART = 5
GPU_HEADROOM_BYTES = 3 * 1024**3 // 2
# Pages of macOS that can be had without compressing or swapping anybody's memory: free ones, those
# of files, and those that their owners have given up (bsd/vm/vm_unix.c of XNU). It is what Activity
# Monitor does not call used.
MACOS_AVAILABLE = (
    b"vm.page_free_count",
    b"vm.page_pageable_external_count",
    b"vm.page_purgeable_count",
)


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes of memory: in all, and not used by anybody now."""

    total_bytes: int
    available_bytes: int
    max_buffer_bytes: int | None = None
    """The largest allocation of the GPU; None on a CPU."""
    on_gpu: bool = False
    """Whether it is what a GPU may use."""

    def headroom_bytes(self, setting: int | None) -> int:
        """Return what is left to other programs: as configured, or what is usual."""
        usual = GPU_HEADROOM_BYTES if self.on_gpu else self.total_bytes // HEADROOM_PART
        return usual if setting is None else setting

    def usable_bytes(self, headroom_bytes: int) -> int:
        """Return what we may use in all."""
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
    """Return what macOS could give without taking it from a program; None where the system is
    another.

    psutil counts free and inactive pages there: some of these are memory of programs, and pages of
    files that were read lately are missing.
    """
    counts = [sysctl(name) for name in MACOS_AVAILABLE]
    pages = [count for count in counts if count is not None]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if len(pages) == len(counts) else None


def gpu_memory(
    machine: MachineMemory, working_set_bytes: int, max_buffer_bytes: int | None = None
) -> MachineMemory:
    """Return what a GPU may use of the machine's memory: the working set that its driver
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

    The hard limit need not be to be had. A Mac's is infinite, and setrlimit(2) refuses infinity and
    all beyond kern.maxfilesperproc: then the most that is not refused is found by halves.
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


# --- the C library's memory -----------------------------------------------------------------------

# What was taken and given back, the C library keeps in pieces: after a crowd or a long prompt that
# may be hundreds of MiB. It gives back whole pages only, so the pieces should lie together.

# Of glibc's malloc.h; and the variable by which a user decides it.
M_ARENA_MAX, ARENA_MAX_VARIABLE = -8, "MALLOC_ARENA_MAX"


def use_one_arena() -> None:
    """Let all threads take memory from one place, unless the user has said otherwise.

    glibc gives each thread an arena of its own: what a crowd leaves, a little in every page, was
    three times as much. Few threads here allocate at the same time. To be called before they start.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and ARENA_MAX_VARIABLE not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Ask the C library to keep none; musl's keeps little by itself."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
