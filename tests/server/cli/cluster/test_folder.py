"""What a machine keeps of its cluster."""

import stat
from pathlib import Path

import pytest

from server.cli.cluster.folder import (
    ClusterError,
    ClusterFolder,
    Node,
    check_own,
    cluster_folder,
    write_own,
)


def test_the_folder_is_the_users_alone_and_remembers_its_process() -> None:
    folder = cluster_folder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.node() is None
    node = Node(1, 2.5, "head:1", is_head=True)
    folder.keep_node(node)
    assert folder.node() == node
    folder.forget_node()
    assert folder.node() is None


def test_a_folder_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    with pytest.raises(ClusterError, match="no folder"):
        cluster_folder()


def test_what_is_written_is_whole_and_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_own(path, "one")
    write_own(path, "two")
    assert path.read_text() == "two"
    check_own(path)
    path.chmod(0o640)
    with pytest.raises(ClusterError, match="mode 640"):
        check_own(path)
    assert ClusterFolder(tmp_path).key == path
