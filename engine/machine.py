"""How much of this machine the process may use: memory and processors."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes of memory: in all, and not used by anybody now."""

    total_bytes: int
    available_bytes: int
    max_buffer_bytes: int | None = None
    """The largest allocation of the GPU; None on a CPU."""


def machine_memory(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> MachineMemory:
    """The machine's memory, or the container's where that is less.

    Shared memory is charged to a control group like any other: beyond its limit the process is
    killed. Limits of version 2: docs.kernel.org/admin-guide/cgroup-v2.html, "memory.max".
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in own_groups(groups, own):
        limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
        if limit is not None and used is not None:
            total = min(total, limit)
            available = min(available, max(0, limit - used + reclaimable_bytes(folder)))
    return MachineMemory(total, available)


def reclaimable_bytes(group: Path) -> int:
    """What a control group is charged with and gives back when it is short: page cache, of which
    shared memory is none, though the kernel counts it among the files."""
    try:
        figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(figures["file"]) - int(figures["shmem"]))
    except (OSError, ValueError, KeyError):
        return 0


def gpu_memory(
    machine: MachineMemory, working_set_bytes: int, max_buffer_bytes: int | None = None
) -> MachineMemory:
    """What a GPU may use of the machine's memory: the working set that its driver recommends."""
    total = min(machine.total_bytes, working_set_bytes)
    available = min(machine.available_bytes, working_set_bytes)
    return MachineMemory(total, available, max_buffer_bytes)


def headroom_bytes(asked: int | None, total_bytes: int) -> int:
    """What is left to other programs: as configured, or a fifth of the memory."""
    return total_bytes // 5 if asked is None else asked


def machine_threads() -> int:
    """Processors that this process may run on, as far as they can be used."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(MAX_THREADS, count)


def own_groups(groups: Path, own: Path) -> list[Path]:
    """The process's group and those around it; each may have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    folder = groups / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(groups))]


def _number(file: Path) -> int | None:
    """None where there is no such file, or "max" in it."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
