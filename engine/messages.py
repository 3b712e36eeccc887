"""The messages that other threads send to the engine's thread, except Request."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory_map import MemoryMap
from engine.types import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End an answer before it is complete."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SetMemoryPressure:
    """Report that the system's memory pressure has changed to ``level``, a PressureLevel."""

    level: int


@dataclass(frozen=True, slots=True)
class CheckModel:
    """Run a health check of the model before the next request."""


@dataclass(frozen=True, slots=True)
class GetMemoryMap:
    """Request a memory map. The engine's thread calls ``answer`` with the map."""

    answer: Callable[[MemoryMap], None]


@dataclass(frozen=True, slots=True)
class SetKVLimit:
    """Limit the memory for K and V to ``limit_bytes``, or to the bytes in use if they are more."""

    limit_bytes: int
    answer: Callable[[int], None]
    """A function that the engine's thread calls with the new limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine after the running step."""


Message = Request | Abort | SetMemoryPressure | SetKVLimit | CheckModel | GetMemoryMap | Stop
