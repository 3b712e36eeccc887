"""What a machine keeps of its cluster."""

import stat
from pathlib import Path

import pytest

from server.cli.cluster_folder import (
    ClusterError,
    ClusterFolder,
    Node,
    check_own,
    checked,
    cluster_folder,
    made_key,
    read_key,
    write_own,
)


def test_a_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = made_key(file)
    assert made_key(file) == read_key(file) == checked(f" {key}\n", "here") == key
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"short", b"\xff" * 64, b"g" * 64])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_bytes(content)
    with pytest.raises(ClusterError, match="key"):
        read_key(file)


def test_a_key_that_is_missing_or_everybodys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="No such file"):
        read_key(tmp_path / "none")
    made_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o604)
    with pytest.raises(ClusterError, match="chmod 600"):
        read_key(tmp_path / "key")


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
