"""What a machine keeps of its cluster."""

import stat
from pathlib import Path

import pytest

from server.cli.cluster_folder import (
    ClusterError,
    ClusterFolder,
    Node,
    cluster_folder,
    ensure_key,
    parse_key,
    read_key,
    write_private,
)


def test_a_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = ensure_key(file)
    assert ensure_key(file) == read_key(file) == parse_key(f" {key}\n", "here") == key
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
    ensure_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o604)
    with pytest.raises(ClusterError, match="chmod 600"):
        read_key(tmp_path / "key")


def test_the_folder_is_the_users_alone_and_remembers_its_process() -> None:
    folder = cluster_folder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.node() is None
    node = Node(1, 2.5, "head:1", is_head=True)
    folder.write_node(node)
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
    write_private(path, "one")
    write_private(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o077 == 0
    assert ClusterFolder(tmp_path).key == path
