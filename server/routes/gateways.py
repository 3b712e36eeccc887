"""GET /server_info, /model_info and /v1/loads: what gateways of sglang's kind ask of a server.

Older names of the first two begin with ``get_``; smg calls the third one /loads as well.
"""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from server.routes.service import Service


def gateway_routes(service: Service) -> APIRouter:
    """Return the routes, for one service."""
    router = APIRouter()
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
        """The fields are those of sglang's /v1/loads. Tokens of K and V that running requests hold:
        what is cached for others is free."""
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
                "num_used_tokens": kv.used_bytes // kv.block_bytes * kv.block_tokens,
                "max_total_num_tokens": kv.capacity_bytes // kv.block_bytes * kv.block_tokens,
                "token_usage": kv.used_bytes / kv.capacity_bytes,
            }
        return {"dp_rank_count": 1, "loads": [load]}

    for name in ("/v1/loads", "/loads"):
        router.add_api_route(name, loads, methods=["GET"], include_in_schema=False)
    for name, answer in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", answer, methods=["GET"], include_in_schema=False)
        router.add_api_route(f"/get_{name}", answer, methods=["GET"], include_in_schema=False)
    return router
