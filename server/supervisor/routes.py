"""The routes of several models: most are answered by a model's process, some by the front."""

import asyncio
import re
from hashlib import sha256
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.chat.salts import request_key
from server.protocol.common import limits_by_path
from server.protocol.wire_errors import (
    ApiError,
    from_validation,
    not_json,
    shutting_down,
    unavailable,
)
from server.routes.answering import LineFraming
from server.routes.models import LIST_PATHS, anthropic_model, listed, models_answer
from server.routes.openapi import speaks_anthropic, speaks_ollama
from server.routes.operations import who_answers
from server.routes.reading import JSON_TYPE
from server.supervisor.errors import NoAnswerError, model_ended
from server.supervisor.forward import (
    EVENTS,
    Asked,
    ForwardedAnswer,
    Forwarding,
    Waiting,
    sent_headers,
    target_of,
)
from server.supervisor.front import Front
from server.supervisor.metrics import FrontMetrics
from server.supervisor.models import ManagedModel
from server.supervisor.ollama import SHOW, empty_line, kept_s, ollama_list_routes, unloaded
from server.supervisor.process import Headers, ModelProcess

STORED_RESPONSE = "/v1/responses/{response_id}"
# As it came: what is forwarded is not decoded.
STORED_TARGET = re.compile(rb"/v1/responses/[A-Za-z0-9_-]{1,64}(?=[/?]|\Z)")


class Head(BaseModel):
    """What the front reads of a body."""

    model: str | None = None
    stream: Any = None
    keep_alive: Any = None


def forwarding_routes(front: Front) -> APIRouter:
    """Return the routes that a model's process answers."""
    router, config = APIRouter(), front.config
    how = Forwarding(
        front.models,
        config.models.load_timeout_s,
        config.server.sse_ping_s,
    )
    limits = limits_by_path(config.limits)

    async def body_of(request: Request) -> bytes:
        """Read a body, within the limits of its route. Raises ApiError."""
        if not JSON_TYPE.match(request.headers.get("content-type", "")):
            raise not_json()
        body = await request.body()
        await limits[request.scope["route"].path].check(body)
        return body

    async def model_of(request: Request, name: str | None) -> ManagedModel:
        """Return the model that a client means; the log has its name. Raises ApiError (404)."""
        model = await front.model_of(name)
        request.state.model = model.name
        return model

    async def forward(request: Request) -> Response:
        body = await body_of(request)
        try:
            head = Head.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error, body) from error
        model, kept = await model_of(request, head.model), kept_s(head.keep_alive)
        if kept == 0 and (answer := await unloaded(front, model, request, body)) is not None:
            return answer
        waiting = waiting_of(request, model, head)
        asked = Asked(model, client_of(request), body, waiting, kept)
        return ForwardedAnswer(request, asked, how)

    async def look(request: Request) -> Response:
        """Of the model that is named in the query; else of the one that was used last."""
        model = await model_of(request, request.query_params.get("model"))
        if not model.loaded:
            raise unavailable(f"{model.name} is not loaded; the next request to it loads it.")
        return ForwardedAnswer(request, Asked(model, client_of(request), b""), how)

    async def stored(request: Request) -> Response:
        """Ask all loaded models for a response: one of them has it, if any."""
        body = await request.body()
        model = await model_with_response(front, request)
        request.state.model = model.name
        return ForwardedAnswer(request, Asked(model, client_of(request), body), how)

    router.include_router(ollama_list_routes(front, body_of))
    for path in limits.keys() - {SHOW}:
        router.add_api_route(path, forward, methods=["POST"])
    for path in ("/memory", "/openapi.json"):
        router.add_api_route(path, look, methods=["GET"])
    router.add_api_route(STORED_RESPONSE, stored, methods=["GET", "DELETE"])
    router.add_api_route(f"{STORED_RESPONSE}/{{rest:path}}", stored, methods=["GET", "POST"])
    return router


def waiting_of(request: Request, model: ManagedModel, head: Head) -> Waiting | None:
    """Return what a stream has before its answer; None for an answer in one piece."""
    if not speaks_ollama(request.scope):
        return EVENTS if head.stream is True else None
    line = None if head.stream is False else empty_line(request.url.path, model.name)
    if line is None:
        return None
    return Waiting(LineFraming.media_type.encode(), line, begins_at_once=True)


async def model_with_response(front: Front, request: Request) -> ManagedModel:
    """Return the model that has stored the response that a request is about, for its client. Raises
    ApiError: 404, or 503 where one does not say whether it has."""
    error = ApiError(404, "No model that is loaded has this response.", type="not_found_error")
    if (target := STORED_TARGET.match(target_of(request.scope))) is None:
        raise error
    headers, loaded = sent_headers(request), front.models.loaded
    processes = [model.process for model in loaded if model.process is not None]
    asking = (_status(process, target[0], headers) for process in processes)
    for model, status in zip(loaded, await asyncio.gather(*asking), strict=True):
        if status == 200:
            return model
        if status is None:
            error = model_ended(model.name)
    raise error


async def _status(process: ModelProcess, target: bytes, headers: Headers) -> int | None:
    """Return the status of what a process answers; None where it does not."""
    try:
        return (await process.get(target, headers)).status
    except NoAnswerError:
        return None


def client_of(request: Request) -> bytes:
    """Return who asks, as far as that can be told: for how long a model is kept."""
    host = request.client.host if request.client else ""
    return sha256(f"{request_key(request.headers)}\n{host}".encode()).digest()


def model_list_routes(front: Front) -> APIRouter:
    """Return the routes that list all models, loaded or not."""
    router = APIRouter()

    def entry(request: Request, model: ManagedModel) -> dict[str, Any]:
        length = model.needs.max_model_len if model.needs else None
        if speaks_anthropic(request.scope):
            return anthropic_model(model.name, model.source.created, length)
        return listed(model.name, model.source.created, length) | {"loaded": model.loaded}

    async def list_models(request: Request) -> dict[str, Any]:
        return models_answer(request, [entry(request, its) async for its in front.fitting()])

    async def get_model(request: Request, name: str) -> dict[str, Any]:
        model = await front.model_of(name)
        await front.models.fits(model)
        return entry(request, model)

    for path in LIST_PATHS:
        router.add_api_route(path, list_models, methods=["GET", "HEAD"])
    for base in ("/v1", ""):
        router.add_api_route(f"{base}/models/{{name:path}}", get_model, methods=["GET", "HEAD"])
    return router


def operation_routes(front: Front, metrics: FrontMetrics) -> APIRouter:
    """Return what operators ask."""
    router = APIRouter()

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return who_answers()

    @router.head("/api/hello", include_in_schema=False)  # Claude Code opens a connection so
    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "draining" if front.drain.draining else "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Whether all models that are pinned can answer; others are loaded when they are asked."""
        if front.drain.draining:
            raise shutting_down()
        for model in front.models.models.values():
            if model.pinned and not model.loaded:
                raise unavailable(f"{model.name} is not loaded yet.")
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        metrics.draining = front.drain.draining
        page = await metrics.render_all(_own_headers(front))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return router


def _own_headers(front: Front) -> Headers:
    """Return what the front itself sends to a process that wants a key."""
    access = front.config.access
    keys = [access.scrape_key] if access.scrape_key else list(access.api_keys[:1])
    named = [(b"authorization", f"Bearer {key.get_secret_value()}".encode()) for key in keys]
    return [(b"host", b"localhost"), *named]
