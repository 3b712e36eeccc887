"""The user's private folder for a cluster: key, certificates, settings, Ray process's pid."""

import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from kvcache.user_folders import state_folder
from server.config import StartError

KEY_BYTES = 32
KEY = re.compile(r"[0-9a-f]{64}")


class ClusterError(StartError):
    """Raised if a cluster command fails."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Node:
    """The Ray process on this machine by which the machine belongs to a cluster."""

    pid: int
    started: float
    """Start time in Unix seconds: it tells the process from a later one with the same pid."""
    head: str
    """HOST:PORT of the cluster's first machine, whose Ray process the other machines join."""
    is_head: bool
    family: tuple[tuple[int, float], ...] = ()
    """``(pid, started)`` of child processes: a child process may outlive its killed parent."""


NODE = TypeAdapter(Node)


class ClusterFolder:
    """The paths of the files in the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "key"
        self.authority = path / "authority.pem"
        self.certificate = path / "certificate.pem"
        self.private_key = path / "private-key.pem"
        self.settings = path / "settings.json"
        self.log = path / "ray.log"
        self._node = path / "node.json"

    def make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def node(self) -> Node | None:
        """Return the Ray process that was started last, which may have ended."""
        with suppress(FileNotFoundError):
            return NODE.validate_json(self._node.read_bytes())
        return None

    def write_node(self, node: Node) -> None:
        write_private(self._node, NODE.dump_json(node).decode())

    def forget_node(self) -> None:
        self._node.unlink(missing_ok=True)


def cluster_folder() -> ClusterFolder:
    """Create this user's folder if it is missing, and return it. Raises ClusterError."""
    try:
        folder = ClusterFolder(state_folder() / "cluster")
        folder.make()
    except (OSError, RuntimeError) as error:
        raise ClusterError(f"there is no folder for a cluster's key: {error}") from error
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600; replace an existing file atomically."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    new.replace(path)


def ensure_key(file: Path) -> str:
    """Return the key in a file; make a missing file with a random key. Raises ClusterError."""
    if not file.exists():
        write_private(file, secrets.token_hex(KEY_BYTES))
    return read_key(file)


def read_key(file: Path) -> str:
    """Raises ClusterError if the file holds no key or other users have access to the file."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077:
            raise ClusterError(
                f"{file}: it keeps a key, and others may use it (mode {mode:o}): `chmod 600` it"
            )
        return parse_key(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file}: {error}") from error


def parse_key(text: str, source: str) -> str:
    """Return a key without spaces around it. source: the key's file. Raises ClusterError."""
    key = text.strip()
    if not KEY.fullmatch(key):
        raise ClusterError(
            f"{source}: this is no key of a cluster, which has {2 * KEY_BYTES} digits"
        )
    return key
