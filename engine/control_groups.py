"""The control groups that a process is in, and what they let it use.

Linux has two versions, and a system may have both. Version 2:
docs.kernel.org/admin-guide/cgroup-v2.html. Version 1:
docs.kernel.org/admin-guide/cgroup-v1/memory.html and docs.kernel.org/scheduler/sched-bwc.html. What
cannot be read limits nothing.
"""

from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
VERSION_2 = ""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A group that has a limit. Bytes."""

    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int
    """Of what is used: page cache, which it gives back when it is short. Shared memory is none,
    though the kernel counts it among the files."""


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
    found = [_version_2(folder) for folder in own_groups(groups, own)]
    found += [_version_1(folder) for folder in own_groups(groups, own, "memory")]
    return [memory for memory in found if memory is not None]


def _version_2(folder: Path) -> GroupMemory | None:
    limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    stat = _figures(folder / "memory.stat")
    return GroupMemory(limit, used, max(0, stat.get("file", 0) - stat.get("shmem", 0)))


def _version_1(folder: Path) -> GroupMemory | None:
    """Return a group's memory. Without a limit the kernel reports one of almost 2^63 bytes."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (_number(folder / name) for name in names)
    if limit is None or used is None:
        return None
    stat = _figures(folder / "memory.stat")
    # A container does not see the groups around its own, but is told of their limits.
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


def _number(file: Path) -> int | None:
    """Return the number; None where there is no such file, or "max" in it."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
