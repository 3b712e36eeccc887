"""Cache of the newest memory map, the state of all KV cache blocks, for clients of GET /memory."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic_core import to_json

from engine.memory_map import MemoryMap
from engine.serving import ServingEngine
from engine.types import EngineDeadError

# A map that is at most this old is sent again.
MAX_AGE_S = 0.1
# An engine that takes longer to send a map is in a long step, or stuck.
ENGINE_WAIT_S = 1.0


@dataclass(slots=True)
class MemoryMapCache:
    """Keeps the newest memory map as JSON. Only the event loop's thread may use this object."""

    client: ServingEngine
    wait_s: float = ENGINE_WAIT_S
    """The maximum time that ``get`` waits for a new map."""
    clock: Callable[[], float] = time.monotonic
    _asking: "asyncio.Task[None] | None" = field(default=None, init=False)
    _newest: tuple[bytes, float] | None = field(default=None, init=False)

    async def get(self) -> tuple[bytes, float] | None:
        """Return the newest map as JSON, and the map's age in seconds. The map is old if the engine
        has ended or is late. Return None if there is no map yet."""
        if self._asking is None and self._age_s() > MAX_AGE_S and self.client.alive:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            # A timeout does not cancel the task, so a stuck engine gets no second request.
            await asyncio.wait((self._asking,), timeout=self.wait_s)
        return None if self._newest is None else (self._newest[0], self._age_s())

    def _age_s(self) -> float:
        return float("inf") if self._newest is None else self.clock() - self._newest[1]

    async def _ask(self) -> None:
        try:
            with suppress(EngineDeadError):
                memory_map = await self.client.memory_map()
                taken_at = self.clock()
                self._newest = await asyncio.to_thread(_encode, memory_map), taken_at
        finally:
            self._asking = None


def _encode(memory_map: MemoryMap) -> bytes:
    return to_json(memory_map.as_json())
