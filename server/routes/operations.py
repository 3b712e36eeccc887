"""GET /version, /health, /ready, /metrics, /memory, /cluster/replicas, and paths for gateways."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.protocol.wire_errors import come_back, shutting_down, unavailable
from server.routes.memory import MemoryMapCache
from server.routes.service import Served, Service

REPLICAS = "/cluster/replicas"
REPLICAS_DESCRIPTION = (
    "The replicas of the cluster, each as it was when it said so last: its machine, whether it "
    "answers, what runs and waits there, blocks of its cache, and counts of tokens since its start."
)
MEMORY_DESCRIPTION = (
    "What every block of the K and V cache is for, which sequences have it, and the requests that "
    "ended last; where there are several keys, those of the key that asks. Counts only. All who "
    "ask within 0.1 s get the same map; age_s says how old it is."
)
JSON_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}}
}


def add_routes(router: APIRouter, service: Service) -> None:
    _add_gateway_routes(router, service)
    _add_memory_routes(router, service)
    _add_replica_routes(router, service)


def _add_gateway_routes(router: APIRouter, service: Service) -> None:
    model, rules = service.model, service.rules

    async def model_info() -> dict[str, Any]:
        embeds = service.client.limits.embedding_size is not None
        return {"model_path": model.id, "is_generation": not embeds}

    async def server_info() -> dict[str, Any]:
        limits = service.client.limits
        return {
            "name": "quire",
            "version": version("quire"),
            "model_path": model.id,
            "served_model_name": model.id,
            "context_length": rules.max_model_len,
            "max_running_requests": limits.max_num_seqs,
        }

    async def loads() -> dict[str, Any]:
        """Answer like sglang's /v1/loads, where cached tokens count as free."""
        limits, stats = service.client.limits, service.client.stats
        load: dict[str, int | float] = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "max_running_requests": limits.max_num_seqs,
        }
        if (kv := stats.kv) is not None:
            load |= {
                "num_used_tokens": kv.used_tokens,
                "max_total_num_tokens": kv.capacity_tokens,
                "token_usage": kv.used_tokens / kv.capacity_tokens,
            }
        return {"dp_rank_count": 1, "loads": [load]}

    for name in ("/v1/loads", "/loads"):
        router.add_api_route(name, loads, methods=["GET"], include_in_schema=False)
    for name, answer in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", answer, methods=["GET"], include_in_schema=False)
        router.add_api_route(f"/get_{name}", answer, methods=["GET"], include_in_schema=False)


def add_state_routes(router: APIRouter, served: Served) -> None:
    """Add the routes with which programs check a server and read its figures."""
    drain, figures = served.drain, served.metrics

    @router.get("/version", include_in_schema=False)
    async def get_version() -> dict[str, str]:
        # The web page takes the path of the list of replicas from this answer.
        replicas = {} if served.replicas is None else {"replicas": REPLICAS}
        own = {"name": "quire", "version": version("quire"), "models": "/v1/models"}
        return own | replicas

    @router.head("/api/hello", include_in_schema=False)  # Claude Code's first request
    @router.get("/health")
    async def health() -> Response:
        if not served.alive:
            raise unavailable("The engine has ended.")
        return JSONResponse({"status": "draining" if drain.draining else "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        if drain.draining:
            raise shutting_down()
        await served.check_ready()
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        figures.draining = drain.draining
        return Response(await figures.page(), media_type=CONTENT_TYPE_LATEST)


def _add_replica_routes(router: APIRouter, service: Service) -> None:
    """Add the list of a cluster's replicas, if the service has replicas."""
    if (listed := service.replicas) is None:
        return

    @router.get(REPLICAS, description=REPLICAS_DESCRIPTION, responses=JSON_OBJECT)
    async def replicas() -> Response:
        return _newest(to_json({"model": service.model.id, "replicas": listed()}))


def _add_memory_routes(router: APIRouter, service: Service) -> None:
    cache, reader = MemoryMapCache(service.client), service.reader
    several_keys = len(service.config.access.api_keys) > 1

    @router.get("/memory", description=MEMORY_DESCRIPTION, responses=JSON_OBJECT)
    async def memory(request: Request) -> Response:
        seen = await cache.get()
        if seen is None:
            raise come_back(
                503,
                "The engine does not say what the memory holds: it has ended, or is in a long step",
                "no_memory_map",
            )
        body, age_s = seen
        tenant = reader.tenant(request)
        head = {
            "model": service.model.id,
            "engine_alive": service.client.alive,
            "age_s": round(age_s, 3),
            "requests": service.recent.newest_first(tenant if several_keys else None),
        }
        # The map is appended as text, since it was encoded once for all clients.
        return _newest(to_json(head)[:-1] + b',"map":' + body + b"}")


def _newest(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
