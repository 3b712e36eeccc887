"""Reads the system's memory pressure.

macOS has one number for it. Linux measures how long tasks wait for memory
(docs.kernel.org/accounting/psi.html) and charges control groups for what they use. What cannot be
read counts as no pressure.
"""

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from engine.control_groups import CONTROL_GROUPS, GroupMemory, memory_of_groups, own_groups

PROC = Path("/proc")
SYSCTL = b"kern.memorystatus_vm_pressure_level"
# Of the last ten seconds, in percent: some task waited for memory.
STALLED_WARNING, STALLED_CRITICAL = 10.0, 40.0
# Of what a group may use: used, and no page cache that would make room.
USED_WARNING, USED_CRITICAL = 0.90, 0.97
# Of the machine's memory: still to be had. For kernels that do not measure stalls.
AVAILABLE_WARNING, AVAILABLE_CRITICAL = 0.05, 0.02

Sysctl = Callable[[bytes], int | None]
PressureSource = Callable[[], int]


class PressureLevel(IntEnum):
    """How short of memory the system is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


# kern.memorystatus_vm_pressure_level, as in XNU's osfmk/vm/vm_pageout.h.
MACOS_LEVELS = {1: PressureLevel.NORMAL, 2: PressureLevel.WARNING, 4: PressureLevel.CRITICAL}


def pressure_source(platform: str = sys.platform) -> PressureSource:
    """Return what to ask on this system."""
    return macos_pressure if platform == "darwin" else linux_pressure


def macos_pressure(sysctl: Sysctl | None = None) -> PressureLevel:
    """Return the level that the kernel tells programs. sysctl: reads an integer by its name."""
    return MACOS_LEVELS.get((sysctl or read_sysctl)(SYSCTL) or 0, PressureLevel.NORMAL)


def read_sysctl(name: bytes) -> int | None:
    """Return an integer of the kernel; None where this system has none of that name."""
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return None
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = call(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.value


def linux_pressure(proc: Path = PROC, groups: Path = CONTROL_GROUPS) -> PressureLevel:
    """Return the worst of what the machine and the process's control groups say."""
    own = proc / "self/cgroup"
    stalls = [proc / "pressure/memory"]
    stalls += [folder / "memory.pressure" for folder in own_groups(groups, own)]
    levels = [_stalled(file) for file in stalls]
    levels += [_used(group) for group in memory_of_groups(groups, own)]
    if not stalls[0].exists():
        levels.append(_available(proc / "meminfo"))
    return max(levels)


def _stalled(file: Path) -> PressureLevel:
    """Return the level of the line ``some avg10=0.00 avg60=...``."""
    for line in _text(file).splitlines():
        kind, _, figures = line.partition(" avg10=")
        if kind == "some":
            return _level(_number(figures.split()[0]), STALLED_WARNING, STALLED_CRITICAL)
    return PressureLevel.NORMAL


def _used(group: GroupMemory) -> PressureLevel:
    """Return the level of what a group is charged with and cannot reclaim."""
    kept = group.used_bytes - group.reclaimable_bytes
    return _level(kept / max(1, group.limit_bytes), USED_WARNING, USED_CRITICAL)


def _available(file: Path) -> PressureLevel:
    figures = {name: rest.split() for name, _, rest in map(_parted, _text(file).splitlines())}
    total, available = (_number((figures.get(n) or [""])[0]) for n in ("MemTotal", "MemAvailable"))
    if not total or "MemAvailable" not in figures:
        return PressureLevel.NORMAL
    return _level(1 - available / total, 1 - AVAILABLE_WARNING, 1 - AVAILABLE_CRITICAL)


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _level(value: float, warning: float, critical: float) -> PressureLevel:
    if value >= critical:
        return PressureLevel.CRITICAL
    return PressureLevel.WARNING if value >= warning else PressureLevel.NORMAL


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(text: str) -> float:
    """Return the number; 0 where there is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
