"""The files that a machine has for its cluster, readable by its user alone: the key, certificates,
settings, and the process of Ray's that it has started."""

import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcache.user_folders import state_folder
from server.config import StartError

KEY_BYTES = 32
KEY = re.compile(r"[0-9a-f]{64}")


class ClusterError(StartError):
    """A cluster cannot do what a command wants."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Node:
    """The process by which this machine is in a cluster."""

    pid: int
    started: float
    """Unix seconds, by the system: another process may get the same pid later."""
    head: str
    """The address of the head, HOST:PORT."""
    is_head: bool
    family: tuple[tuple[int, float], ...] = ()
    """``pid`` and ``started`` of its children after the start: they may outlive its kill."""


class ClusterFolder:
    """The paths of these files."""

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
        """Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)

    def node(self) -> Node | None:
        """Return the process that was started here last, whether it runs or not."""
        try:
            fields = json.loads(self._node.read_text())
        except FileNotFoundError:
            return None
        family = tuple((pid, started) for pid, started in fields.pop("family", ()))
        return Node(**fields, family=family)

    def write_node(self, node: Node) -> None:
        write_private(self._node, json.dumps(asdict(node)))

    def forget_node(self) -> None:
        self._node.unlink(missing_ok=True)


def cluster_folder() -> ClusterFolder:
    """Return this user's folder, and make it. Raises ClusterError."""
    try:
        folder = ClusterFolder(state_folder() / "cluster")
        folder.make()
    except (OSError, RuntimeError) as error:
        raise ClusterError(f"there is no folder for a cluster's key: {error}") from error
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, whole or not at all."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    new.replace(path)


def ensure_key(file: Path) -> str:
    """Return the key in a file; make both where there is none. Raises ClusterError."""
    if not file.exists():
        write_private(file, secrets.token_hex(KEY_BYTES))
    return read_key(file)


def read_key(file: Path) -> str:
    """Return the key in a file. Raises ClusterError for a file without one, or that others may
    use."""
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
    """Return a key without the space around it. source: for the message. Raises ClusterError."""
    key = text.strip()
    if not KEY.fullmatch(key):
        raise ClusterError(
            f"{source}: this is no key of a cluster, which has {2 * KEY_BYTES} digits"
        )
    return key
