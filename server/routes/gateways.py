"""GET /server_info and /model_info: what gateways of sglang's kind ask of a server before they send
to it. Their older names begin with ``get_``."""

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

    for name, answer in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", answer, methods=["GET"], include_in_schema=False)
        router.add_api_route(f"/get_{name}", answer, methods=["GET"], include_in_schema=False)
    return router
