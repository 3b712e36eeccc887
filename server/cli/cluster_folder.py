"""What a machine keeps of its cluster, for its user alone: the key, certificates, settings, and
which process of Ray's it has started."""

import json
import os
import re
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcache.user_folders import state_folder
from server.config import StartError

OWN_FILE = 0o600
OWN_FOLDER = 0o700


class ClusterError(StartError):
    """What a cluster cannot do now."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Node:
    """The process by which this machine is in a cluster."""

    pid: int
    started: float
    """When; Unix seconds, as the system has it: another process may get the same pid later."""
    head: str
    """The address of the head, HOST:PORT."""
    is_head: bool
    family: tuple[tuple[int, float], ...] = ()
    """What that process had started when all of it was there, as ``pid`` and ``started``: it may be
    left where the process is killed."""


class ClusterFolder:
    """The files of a machine's cluster."""

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
        """Make the folder. Raises OSError."""
        self.path.mkdir(mode=OWN_FOLDER, parents=True, exist_ok=True)
        self.path.chmod(OWN_FOLDER)

    def node(self) -> Node | None:
        """Return the process that was started here last, whether it runs or not."""
        try:
            found = json.loads(self._node.read_text())
        except FileNotFoundError:
            return None
        family = tuple((pid, started) for pid, started in found.pop("family", ()))
        return Node(**found, family=family)

    def keep_node(self, node: Node) -> None:
        """Remember the process."""
        write_own(self._node, json.dumps(asdict(node)))

    def forget_node(self) -> None:
        """Forget the process: it has ended."""
        self._node.unlink(missing_ok=True)


def cluster_folder() -> ClusterFolder:
    """Return the folder of this user, and make it. Raises ClusterError."""
    try:
        folder = ClusterFolder(state_folder() / "cluster")
        folder.make()
    except (OSError, RuntimeError) as error:
        raise ClusterError(f"there is no folder for a cluster's key: {error}") from error
    return folder


def write_own(path: Path, text: str) -> None:
    """Write a file that nobody else can read, at once or not at all."""
    made = path.with_suffix(".new")
    made.unlink(missing_ok=True)
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN_FILE), "w") as stream:
        stream.write(text)
    made.replace(path)


def check_own(path: Path) -> None:
    """Raise ClusterError for a file that others may use."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ClusterError(
            f"{path}: it keeps a key, and others may use it (mode {mode:o}): `chmod 600` it"
        )


KEY_BYTES = 32
KEY = re.compile(r"[0-9a-f]{64}")


def made_key(file: Path) -> str:
    """Return the key in a file, and make both where there is none. Raises ClusterError."""
    if not file.exists():
        write_own(file, secrets.token_hex(KEY_BYTES))
    return read_key(file)


def read_key(file: Path) -> str:
    """Return the key in a file. Raises ClusterError where it is none, or others may read it."""
    try:
        check_own(file)
        return checked(file.read_text(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file}: {error}") from error


def checked(text: str, where: str) -> str:
    """Return a key without what stands around it. where: it comes from. Raises ClusterError."""
    key = text.strip()
    if not KEY.fullmatch(key):
        raise ClusterError(
            f"{where}: this is no key of a cluster, which has {2 * KEY_BYTES} digits"
        )
    return key
