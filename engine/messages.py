"""What the engine's mailbox takes, beside requests."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory_map import MemoryMap
from engine.types import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Somebody no longer wants this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """How short of memory the system is from now on."""

    level: int
    """0 is not at all: engine/pressure.py."""


@dataclass(frozen=True, slots=True)
class Look:
    """Somebody wants to see what the memory holds."""

    answer: Callable[[MemoryMap], None]
    """Called on the engine's thread."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine should end after the running step."""


Message = Request | Abort | Pressure | Look | Stop
