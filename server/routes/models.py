"""GET /v1/models and /v1/models/{id}, under all paths that clients use for them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.protocol.advice import advised_answer_tokens
from server.routes.openapi import speaks_anthropic
from server.routes.service import Service

Json = dict[str, Any]

LIST_PATHS = tuple(
    f"{base}/models{end}"
    for base in ("/v1", "")
    # Some clients append a question mark, either plain or escaped.
    for end in ("", "/", "?")
)


def add_routes(router: APIRouter, service: Service) -> None:
    """Add the routes with and without /v1, which some clients leave out."""
    model, max_model_len = service.model, service.rules.max_model_len

    def entry(request: Request) -> Json:
        if speaks_anthropic(request.scope):
            return anthropic_model(model.id, model.created, max_model_len)
        return listed(model.id, model.created, max_model_len)

    async def list_models(request: Request) -> Json:
        return models_answer(request, [entry(request)])

    async def get_model(request: Request, name: str) -> Json:
        model.check(name)
        return entry(request)

    for number, path in enumerate(LIST_PATHS):
        router.add_api_route(path, list_models, include_in_schema=number == 0)
        router.add_api_route(path, list_models, methods=["HEAD"], include_in_schema=False)
    for base in ("/v1", ""):
        path = f"{base}/models/{{name:path}}"
        router.add_api_route(path, get_model, include_in_schema=base == "/v1")
        router.add_api_route(path, get_model, methods=["HEAD"], include_in_schema=False)


def models_answer(request: Request, entries: Sequence[Json]) -> Json:
    """Return the list object that the client's API defines, with ``entries`` as members."""
    if speaks_anthropic(request.scope):
        first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
        return {"data": entries, "has_more": False, "first_id": first, "last_id": last}
    return {"object": "list", "data": entries}


def listed(name: str, created: int, max_model_len: int | None) -> Json:
    """Return OpenAI's object for a model. ``created`` is a Unix time."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "max_model_len": max_model_len,
        "context_length": max_model_len,
    }


def anthropic_model(name: str, created: int, max_model_len: int | None) -> Json:
    """Return Anthropic's object for a model. The parameters are as in ``listed``."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": None if max_model_len is None else advised_answer_tokens(max_model_len),
    }
