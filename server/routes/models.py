"""GET /v1/models and /v1/models/{id}, in the spellings that clients have for them."""

from typing import Any

from fastapi import APIRouter

from server.service import Service

LIST_PATHS = tuple(
    f"{base}/models{end}"
    for base in ("/v1", "")
    # Some clients end the address with a question mark, and some of these escape it.
    for end in ("", "/", "?")
)


def model_routes(service: Service) -> APIRouter:
    """The routes, for one service; without /v1 for clients whose base URL has none."""
    router = APIRouter()

    def entry() -> dict[str, Any]:
        return {
            "id": service.model.id,
            "object": "model",
            "created": service.model.created,
            "owned_by": "quire",
            "max_model_len": service.max_model_len,
            "context_length": service.max_model_len,
        }

    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry()]}

    async def get_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return entry()

    for number, path in enumerate(LIST_PATHS):
        router.add_api_route(path, list_models, include_in_schema=number == 0)
    for base in ("/v1", ""):
        router.add_api_route(
            f"{base}/models/{{name:path}}", get_model, include_in_schema=base == "/v1"
        )
    return router
