"""GET /memory: what every block of the cache is for, the sequences, and the last requests."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from server.metrics.memory_map import MemoryMapCache
from server.protocol.wire_errors import RETRY_AFTER_S, ApiError
from server.routes.service import Service

JSON = "application/json"
DESCRIPTION = (
    "What every block of the K and V cache is for, which sequences have it, and the requests that "
    "ended last; where there are several keys, those of the key that asks. Counts only. All who "
    "ask within 0.1 s get the same map; age_s says how old it is."
)


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
        seen = await cache.get()
        if seen is None:
            raise ApiError(
                503,
                "The engine does not say what the memory holds: it has ended, or its step takes "
                "long. Ask again later.",
                type="server_error",
                code="no_memory_map",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        body, age_s = seen
        tenant = reader.salt(request).tenant
        head = {
            "model": service.model.id,
            "engine_alive": service.client.alive,
            "age_s": round(age_s, 3),
            "requests": _requests(service, tenant if several_keys else None),
        }
        # The map has been encoded already, once for all who look.
        joined = to_json(head)[:-1] + b',"map":' + body + b"}"
        return Response(joined, media_type=JSON, headers={"Cache-Control": "no-store"})

    return router


def _requests(service: Service, tenant: bytes | None) -> list[dict[str, Any]]:
    """Return the last requests of a tenant, the newest first; of None, all."""
    now = service.recent.clock()
    requests = [asdict(request) for request in service.recent.newest_first(tenant)]
    for request in requests:
        del request["tenant"]
        request["ended_s_ago"] = now - request.pop("ended_at")
    return requests
