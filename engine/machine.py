"""How much of this machine the process may use: memory and processors."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.control_groups import (
    CONTROL_GROUPS,
    OWN_GROUP,
    memory_of_groups,
    processors_of_groups,
)

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
    killed.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for group in memory_of_groups(groups, own):
        left = group.limit_bytes - group.used_bytes + group.reclaimable_bytes
        total = min(total, group.limit_bytes)
        available = min(available, max(0, left))
    return MachineMemory(total, available)


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


def machine_threads(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> int:
    """Processors that this process may run on, as far as they can be used.

    A container's share of their time is rounded up, as Go and Java do it. More threads would use
    it up in the first part of each period, and all stand still for the rest.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    share = processors_of_groups(groups, own)
    if share is not None:
        count = min(count, max(1, math.ceil(share)))
    return min(MAX_THREADS, count)
