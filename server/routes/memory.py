"""GET /memory: the state of every block of the cache, the sequences, and the last requests."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineDeadError
from engine.memory_map import MemoryMap
from engine.serving import ServingEngine
from server.protocol.wire_errors import RETRY_AFTER_S, ApiError
from server.routes.service import Service

JSON = "application/json"
DESCRIPTION = (
    "What every block of the K and V cache is for, which sequences have it, and the requests that "
    "ended last; where there are several keys, those of the key that asks. Counts only. All who "
    "ask within 0.1 s get the same map; age_s says how old it is."
)
# A map that is younger is sent again.
MAX_AGE_S = 0.1
# An engine that does not answer so long is in a long step, or stuck.
ENGINE_WAIT_S = 1.0


def memory_routes(service: Service) -> APIRouter:
    router = APIRouter()
    cache, reader = MemoryMapCache(service.client), service.reader
    several_keys = len(service.config.access.api_keys) > 1

    @router.get(
        "/memory",
        description=DESCRIPTION,
        responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}},
    )
    async def memory(request: Request) -> Response:
        newest = await cache.get()
        if newest is None:
            raise ApiError(
                503,
                "The engine does not say what the memory holds: it has ended, or its step takes "
                "long. Ask again later.",
                type="server_error",
                code="no_memory_map",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        body, age_s = newest
        tenant = reader.salt(request).tenant
        head = {
            "model": service.model.id,
            "engine_alive": service.client.alive,
            "age_s": round(age_s, 3),
            "requests": _requests(service, tenant if several_keys else None),
        }
        # The map has been encoded already, once for all clients.
        joined = to_json(head)[:-1] + b',"map":' + body + b"}"
        return Response(joined, media_type=JSON, headers={"Cache-Control": "no-store"})

    return router


def _requests(service: Service, tenant: bytes | None) -> list[dict[str, Any]]:
    """Return the last requests of a tenant, or all where it is None; the newest come first."""
    now = service.recent.clock()
    requests = [asdict(request) for request in service.recent.newest_first(tenant)]
    for request in requests:
        del request["tenant"]
        request["ended_s_ago"] = now - request.pop("ended_at")
    return requests


class MemoryMapCache:
    """The newest memory map, encoded. Event loop only."""

    def __init__(
        self,
        client: ServingEngine,
        *,
        wait_s: float = ENGINE_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wait_s: the longest time to wait for the engine."""
        self._client = client
        self._wait_s = wait_s
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._newest: tuple[bytes, float] | None = None

    async def get(self) -> tuple[bytes, float] | None:
        """Return the newest map as JSON, and its age in seconds: an old one where the engine does
        not answer in time or has ended; None where there has never been one."""
        if self._asking is None and self._age_s() > MAX_AGE_S and self._client.alive:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            # A timeout leaves the question open, so that a stuck engine is asked only once.
            await asyncio.wait((self._asking,), timeout=self._wait_s)
        return None if self._newest is None else (self._newest[0], self._age_s())

    def _age_s(self) -> float:
        return float("inf") if self._newest is None else self._clock() - self._newest[1]

    async def _ask(self) -> None:
        try:
            with suppress(EngineDeadError):
                memory_map = await self._client.memory_map()
                taken_at = self._clock()
                self._newest = await asyncio.to_thread(encode_map, memory_map), taken_at
        finally:
            self._asking = None


def encode_map(memory_map: MemoryMap) -> bytes:
    return to_json(memory_map.as_json())
