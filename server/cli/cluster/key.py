"""The key of a cluster. Whoever has it can run programs on all machines: it is no API key."""

import re
import secrets
from pathlib import Path

from server.cli.cluster.folder import ClusterError, check_own, write_own

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
