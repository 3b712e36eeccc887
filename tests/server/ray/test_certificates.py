"""Machines of a cluster trust each other's certificates, and nobody else's."""

import socket
import ssl
import threading
from pathlib import Path

import pytest

from server.cli.cluster_folder import ClusterError, ClusterFolder, ensure_key
from server.ray.certificates import write_certificates
from server.ray.ray_process import check_key


def machine(
    path: Path, key: str, addresses: tuple[str, ...] = ("127.0.0.1", "localhost")
) -> ClusterFolder:
    folder = ClusterFolder(path)
    folder.make()
    write_certificates(folder, key, addresses)
    return folder


def served(folder: ClusterFolder) -> int:
    """A port that speaks TLS to one client, and wants a certificate of it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder.authority))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder.certificate, folder.private_key)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener:
            plain, _ = listener.accept()
            with plain:
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    return

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


def test_two_machines_of_one_key_trust_each_other(tmp_path: Path) -> None:
    key = ensure_key(tmp_path / "key")
    head, other = machine(tmp_path / "head", key), machine(tmp_path / "other", key)
    assert head.authority.read_text() != other.authority.read_text()
    check_key(other, f"127.0.0.1:{served(head)}")
    for file in (head.authority, head.certificate, head.private_key):
        assert file.stat().st_mode & 0o077 == 0


def test_a_machine_of_another_key_is_not_trusted(tmp_path: Path) -> None:
    head = machine(tmp_path / "head", ensure_key(tmp_path / "key"))
    other = machine(tmp_path / "other", ensure_key(tmp_path / "other-key"))
    with pytest.raises(ClusterError, match="another key"):
        check_key(other, f"127.0.0.1:{served(head)}")


def test_who_does_not_answer_is_said(tmp_path: Path) -> None:
    folder = machine(tmp_path / "one", ensure_key(tmp_path / "key"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match="does not answer"):
        check_key(folder, f"127.0.0.1:{port}")
