"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter

from server.service import Service


def model_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter()

    def entry() -> dict[str, Any]:
        return {
            "id": service.model.id,
            "object": "model",
            "created": service.model.created,
            "owned_by": "quire",
            "max_model_len": service.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return entry()

    return router
