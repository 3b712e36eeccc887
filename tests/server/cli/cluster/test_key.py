"""The key of a cluster."""

from pathlib import Path

import pytest

from server.cli.cluster.folder import ClusterError
from server.cli.cluster.key import checked, made_key, read_key


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
