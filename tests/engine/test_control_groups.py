"""Both versions of control groups, from files that look like those of Linux."""

from pathlib import Path

import pytest

from engine.control_groups import (
    GroupMemory,
    memory_of_groups,
    own_groups,
    processors_of_groups,
)

MIB = 1024**2
UNLIMITED = 2**63 - 4096
# As a system that has both tells it.
BOTH = """\
9:name=systemd:/
4:memory:/pod/box
2:cpu,cpuacct:/pod
0::/slice/own
"""


class Groups:
    """A process's groups."""

    def __init__(self, folder: Path, own: str = BOTH) -> None:
        self.mounts, self.own = folder / "groups", folder / "own"
        self.own.write_text(own)

    def write(self, folder: str, **files: object) -> None:
        """Files of a group; a double underscore for their dots."""
        place = self.mounts / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(f"{text}\n")

    def write_old(self, folder: str, limit: int, used: int, stat: str = "") -> None:
        """Version 1's memory of a group."""
        self.write(
            folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat
        )

    @property
    def memory(self) -> list[GroupMemory]:
        return memory_of_groups(self.mounts, self.own)

    @property
    def processors(self) -> float | None:
        return processors_of_groups(self.mounts, self.own)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_each_controller_of_version_1_has_a_tree_of_its_own(groups: Groups) -> None:
    at = groups.mounts
    found = {name: own_groups(at, groups.own, name) for name in ("", "memory", "cpu", "blkio")}
    assert found == {
        "": [at / "slice/own", at / "slice", at],
        "memory": [at / "memory/pod/box", at / "memory/pod", at / "memory"],
        "cpu": [at / "cpu/pod", at / "cpu"],
        "blkio": [],
    }


def test_where_nothing_can_be_read_nothing_is_limited(groups: Groups, tmp_path: Path) -> None:
    assert (groups.memory, groups.processors) == ([], None)
    groups.own = tmp_path / "no such file"
    assert own_groups(groups.mounts, groups.own) == []


def test_limits_of_version_1_are_read(groups: Groups) -> None:
    groups.write_old("memory/pod/box", 700 * MIB, 300 * MIB)
    groups.write_old("memory", UNLIMITED, 900 * MIB)
    assert groups.memory == [
        GroupMemory(700 * MIB, 300 * MIB, 0),
        GroupMemory(UNLIMITED, 900 * MIB, 0),
    ]


def test_a_container_of_version_1_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    # Its path is the host's: no such folder is there inside of the container.
    groups = Groups(tmp_path, "4:memory:/docker/1f\n")
    groups.write_old("memory", 700 * MIB, 5)
    assert groups.memory == [GroupMemory(700 * MIB, 5, 0)]


def test_version_1_tells_limits_of_groups_that_cannot_be_seen(groups: Groups) -> None:
    stat = f"cache 5\nhierarchical_memory_limit {500 * MIB}\n"
    groups.write_old("memory/pod/box", UNLIMITED, 300 * MIB, stat)
    assert groups.memory == [GroupMemory(500 * MIB, 300 * MIB, 0)]


def test_page_cache_of_version_1_makes_room_with_that_of_the_groups_inside(groups: Groups) -> None:
    # cache has shared memory in it; the lists of files have not.
    stat = "cache 9\nactive_file 1\ntotal_cache 90\ntotal_active_file 20\ntotal_inactive_file 10\n"
    groups.write_old("memory/pod/box", 700, 300, stat)
    assert groups.memory == [GroupMemory(700, 300, 30)]


def test_version_2_counts_shared_memory_among_files(groups: Groups) -> None:
    stat = "anon 1\nfile 50\nshmem 20\n"
    groups.write("slice/own", memory__max=700, memory__current=300, memory__stat=stat)
    groups.write("slice", memory__max="max", memory__current=300)
    assert groups.memory == [GroupMemory(700, 300, 30)]


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
    groups: Groups, told: dict[str, dict[str, object]], processors: float | None
) -> None:
    for folder, files in told.items():
        groups.write(folder, **files)
    assert groups.processors == processors
