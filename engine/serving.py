"""The interface through which a server uses an engine in the same or in another process."""

from typing import Protocol

from engine.client import Slots, TokenStream
from engine.memory_map import MemoryMap
from engine.types import EngineLimits, EngineStats, Request


class ServingEngine(Protocol):
    """Answers prompts. EngineClient documents the methods, which run on the event loop's thread."""

    def attach(self) -> None: ...

    def end_all(self, message: str) -> None: ...

    @property
    def alive(self) -> bool: ...

    @property
    def pressure(self) -> int: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def step_age_s(self) -> float: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def slots(self) -> Slots: ...

    async def memory_map(self) -> MemoryMap: ...

    def submit(
        self, request: Request, read_with: TokenStream | None = None
    ) -> list[TokenStream]: ...
