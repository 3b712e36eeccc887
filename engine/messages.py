"""Messages to the engine's thread, beside requests."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory_map import MemoryMap
from engine.types import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request: nobody wants its result any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SetMemoryPressure:
    """Note how short of memory the system is from now on."""

    level: int
    """A PressureLevel; 0 is none."""


@dataclass(frozen=True, slots=True)
class CheckModel:
    """See whether the model still computes, before anything else."""


@dataclass(frozen=True, slots=True)
class GetMemoryMap:
    """Make a memory map."""

    answer: Callable[[MemoryMap], None]
    """Called on the engine's thread."""


@dataclass(frozen=True, slots=True)
class SetKVLimit:
    """Let K and V take so many bytes from now on, as far as nobody uses more."""

    limit_bytes: int
    answer: Callable[[int], None]
    """Called on the engine's thread with the bytes that they may take now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine after the running step."""


Message = Request | Abort | SetMemoryPressure | SetKVLimit | CheckModel | GetMemoryMap | Stop
