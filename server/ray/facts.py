"""What must be the same on all machines of a cluster, and how they differ where it is not."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from engine.models.identity import ModelIdentity
from server.config import StartError

Facts = Mapping[str, str]


class UnlikeError(StartError):
    """A machine that differs from the head of its cluster."""


def facts_of(folder: Path) -> Facts:
    """Return what has to agree. folder: of the model; reads all of its weights, unless their
    digests are known. Raises CheckpointError, OSError."""
    return {
        "quire": version("quire"),
        "ray": version("ray"),
        "Python": platform.python_version(),
        "the model's files": ModelIdentity(folder).digest("").hex(),
    }


def check_alike(host: str, here: Facts, head: Facts) -> None:
    """Raise UnlikeError that names what differs. host: of this machine."""
    for name, ours in here.items():
        if ours != head[name]:
            # Versions, or the beginnings of digests.
            raise UnlikeError(
                f"{host} is not like the head of the cluster: {name} is {ours[:16]} there and "
                f"{head[name][:16]} on the head"
            )
