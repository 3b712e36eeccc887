"""The messages that other threads send to the engine's thread, except Request."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory_map import MemoryMap
from engine.types import Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request whose result is no longer wanted."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SetMemoryPressure:
    """Report the system's new PressureLevel."""

    level: int


@dataclass(frozen=True, slots=True)
class CheckModel:
    """Test, before the next request, whether the model can still compute."""


@dataclass(frozen=True, slots=True)
class GetMemoryMap:
    """Ask for a memory map; ``answer`` is called on the engine's thread."""

    answer: Callable[[MemoryMap], None]


@dataclass(frozen=True, slots=True)
class SetKVLimit:
    """Limit the bytes of K and V, but not below the bytes in use."""

    limit_bytes: int
    answer: Callable[[int], None]
    """A function that the engine's thread calls with the new limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine after the running step."""


Message = Request | Abort | SetMemoryPressure | SetKVLimit | CheckModel | GetMemoryMap | Stop
