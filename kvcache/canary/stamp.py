"""Passed tests of what a GPU may be trusted with, remembered: files in the user's cache folder."""

import json
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from kvcache.canary.machine import this_machine
from kvcache.substrates import Substrate
from kvcache.user_folders import cache_folder


class Passed(StrEnum):
    """What has passed. Serving does these things nowhere else."""

    RELEASE = "release test"
    STRESS = "stress test"


def is_there(test: Passed, substrate: Substrate) -> bool:
    """Whether that test of that substrate has passed on this machine, with its system and its MLX
    as they are now."""
    try:
        found = json.loads(path_of(test, substrate).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == _contents(test, substrate))


def write(test: Passed, substrate: Substrate) -> Path:
    """Remembers that it has passed; returns where. Raises OSError."""
    path = path_of(test, substrate)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_contents(test, substrate), indent=2) + "\n")
    return path


def withdraw(test: Passed, substrate: Substrate) -> None:
    """Forgets it, if it was there. Raises OSError."""
    path_of(test, substrate).unlink(missing_ok=True)


def path_of(test: Passed, substrate: Substrate) -> Path:
    """Where it is remembered."""
    key = sha256(json.dumps(_contents(test, substrate), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{test.replace(' ', '-')}-{key[:16]}.json"


def _contents(test: Passed, substrate: Substrate) -> dict[str, str]:
    return {"passed": str(test), "substrate": str(substrate), **this_machine().as_json()}
