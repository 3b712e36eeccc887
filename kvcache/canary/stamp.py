"""A passed release test, remembered: a file in the user's cache folder."""

import json
from hashlib import sha256
from pathlib import Path

from kvcache.canary.machine import this_machine
from kvcache.substrates import Substrate
from kvcache.user_folders import cache_folder


def is_there(substrate: Substrate) -> bool:
    """Whether the release test of that substrate has passed on this machine, with its system and
    its MLX as they are now."""
    try:
        found = json.loads(path_of(substrate).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == _contents(substrate))


def write(substrate: Substrate) -> Path:
    """Remembers that it has passed; returns where. Raises OSError."""
    path = path_of(substrate)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_contents(substrate), indent=2) + "\n")
    return path


def withdraw(substrate: Substrate) -> None:
    """Forgets it, if it was there. Raises OSError."""
    path_of(substrate).unlink(missing_ok=True)


def path_of(substrate: Substrate) -> Path:
    """Where it is remembered."""
    key = sha256(json.dumps(_contents(substrate), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"release-test-{key[:16]}.json"


def _contents(substrate: Substrate) -> dict[str, str]:
    return {"passed": "release test", "substrate": str(substrate), **this_machine().as_json()}
