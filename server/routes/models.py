"""GET /v1/models and /v1/models/{id}, under all paths that clients use for them."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request

from server.protocol.advice import advised_answer_tokens
from server.protocol.answers import Json
from server.protocol.ollama.answer import ModelInfo
from server.routes.openapi import speaks_anthropic
from server.routes.service import Served


def add_routes(router: APIRouter, served: Served) -> None:
    """Add the routes with and without /v1, which some clients leave out."""

    async def list_models(request: Request) -> Json:
        models = await served.list_models()
        if not speaks_anthropic(request.scope):
            return {"object": "list", "data": list(map(openai_model, models))}
        first, last = (models[0].name, models[-1].name) if models else (None, None)
        data = list(map(anthropic_model, models))
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    async def get_model(request: Request, name: str) -> Json:
        model = await served.find_model(name)
        return anthropic_model(model) if speaks_anthropic(request.scope) else openai_model(model)

    for base in ("/v1", ""):
        # Some clients append a question mark, either plain or escaped.
        for path in (f"{base}/models", f"{base}/models/", f"{base}/models?"):
            router.add_api_route(path, list_models, include_in_schema=path == "/v1/models")
            router.add_api_route(path, list_models, methods=["HEAD"], include_in_schema=False)
        path = f"{base}/models/{{name:path}}"
        router.add_api_route(path, get_model, include_in_schema=base == "/v1")
        router.add_api_route(path, get_model, methods=["HEAD"], include_in_schema=False)


def openai_model(model: ModelInfo) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "max_model_len": model.context_length,
        "context_length": model.context_length,
    } | model.state


def anthropic_model(model: ModelInfo) -> Json:
    created = datetime.fromtimestamp(model.created, UTC)
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": advised_answer_tokens(model.context_length),
    }
