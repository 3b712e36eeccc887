"""Makes the HTTP application of the front, which forwards requests to the models' processes."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from math import inf
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.chat.salts import request_key
from server.http.app import ObservedApp, add_guards, release_when_idle
from server.http.errors import add_error_handlers
from server.http.observer import RequestObserver
from server.metrics.answer_times import RecentRequests
from server.protocol.common import limits_by_path
from server.protocol.wire_errors import ApiError, shutting_down, unavailable
from server.routes.models import LIST_PATHS, anthropic_model, listed, models_answer
from server.routes.openapi import speaks_anthropic, speaks_ollama
from server.routes.operations import who_answers
from server.routes.page import add_page_routes
from server.routes.reading import parse_body, read_json
from server.supervisor.forward import (
    EVENT_STREAM,
    ForwardedAnswer,
    ForwardedRequest,
    StreamStart,
    model_ended,
    sent_headers,
    target_of,
)
from server.supervisor.front import Front
from server.supervisor.metrics import FrontMetrics
from server.supervisor.models import ManagedModel, NoRoomError
from server.supervisor.ollama import add_info_routes, line_stream, unload, wanted_keep_alive_s
from server.supervisor.process import Headers, LoadError, ModelProcess, NoAnswerError

SHOW = "/api/show"
MEMORY = "/memory"
STORED_RESPONSE = "/v1/responses/{response_id}"
# Matches a percent-encoded path, since paths are forwarded as the client sent them.
STORED_TARGET = re.compile(rb"/v1/responses/[A-Za-z0-9_-]{1,64}(?=[/?]|\Z)")


def create_front(front: Front) -> tuple[FastAPI, FrontMetrics]:
    """Make the ASGI app. It loads the pinned models at start, and ends all models at shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        releasing = release_when_idle(front.drain, inf, lambda: None)
        work = [front.models.keep_time(), _load_pinned(front), releasing]
        if front.awake is not None:
            work.append(front.keep_awake(front.awake))
        tasks = [asyncio.create_task(each) for each in work]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.models.close()

    config, metrics = front.config, FrontMetrics(front.models)
    observer = partial(
        RequestObserver, metrics=metrics, recent=RecentRequests(), logs_requests=config.log.requests
    )
    app = ObservedApp(observer, lifespan=lifespan, openapi_url=None)
    add_info_routes(app.router, front)
    _add_forwarding_routes(app.router, front)
    _add_model_list_routes(app.router, front)
    _add_operation_routes(app.router, front, metrics)
    add_page_routes(app.router, front.config)
    add_guards(app, config, front.drain, metrics.count_refusal)
    add_error_handlers(app)
    return app, metrics


async def _load_pinned(front: Front) -> None:
    for model in list(front.models.models.values()):
        if model.pinned:
            with suppress(LoadError, NoRoomError):  # the supervisor has logged the error
                await front.models.load(model)


class BodyHead(BaseModel):
    """The fields that the front reads in the body of a request."""

    model: str | None = None
    stream: Any = None
    keep_alive: Any = None


def _add_forwarding_routes(router: APIRouter, front: Front) -> None:
    """Add the routes whose requests are forwarded to the models' processes."""
    limits = front.config.limits

    async def model_of(request: Request, name: str | None) -> ManagedModel:
        """Return the model that a client names, and note it for the log. Raises ApiError (404)."""
        model = await front.model_of(name)
        request.state.model = model.name
        return model

    async def forward(request: Request) -> Response:
        body = await read_json(request, limits)
        head = parse_body(BodyHead.model_validate_json, body)
        model, keep_s = await model_of(request, head.model), wanted_keep_alive_s(head.keep_alive)
        if keep_s == 0 and (answer := await unload(front, model, request, body)) is not None:
            return answer
        stream = stream_start(request, model, head)
        forwarded = ForwardedRequest(model, client_of(request), body, stream, keep_s)
        return ForwardedAnswer(request, front, forwarded)

    async def look(request: Request) -> Response:
        """Forward a request to the query's model, or else to the last used model. Load no model."""
        model = await model_of(request, request.query_params.get("model"))
        if not model.loaded and request.url.path == MEMORY:
            state = front.models.state_of(model)
            return JSONResponse({"model": model.name, **state, "requests": [], "map": None})
        if not model.loaded:
            raise unavailable(f"{model.name} is not loaded; the next request to it loads it.")
        return ForwardedAnswer(request, front, ForwardedRequest(model, client_of(request), b""))

    async def stored(request: Request) -> Response:
        """Forward a request to the loaded model that stores the response in the path."""
        body = await request.body()
        model = await model_with_response(front, request)
        request.state.model = model.name
        return ForwardedAnswer(request, front, ForwardedRequest(model, client_of(request), body))

    for path in limits_by_path(limits).keys() - {SHOW}:
        router.add_api_route(path, forward, methods=["POST"])
    for path in (MEMORY, "/openapi.json"):
        router.add_api_route(path, look, methods=["GET"])
    router.add_api_route(STORED_RESPONSE, stored, methods=["GET", "DELETE"])
    router.add_api_route(f"{STORED_RESPONSE}/{{rest:path}}", stored, methods=["GET", "POST"])


def stream_start(request: Request, model: ManagedModel, head: BodyHead) -> StreamStart | None:
    """Return how the answer's stream begins, or None if the answer is not streamed."""
    if speaks_ollama(request.scope):
        return None if head.stream is False else line_stream(request.url.path, model.name)
    return EVENT_STREAM if head.stream is True else None


async def model_with_response(front: Front, request: Request) -> ManagedModel:
    """Return the loaded model that stores the response in the path. Raises ApiError (404, 503)."""
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
    """Return the HTTP status of a process's answer, or None if the process does not answer."""
    try:
        return (await process.get(target, headers)).status
    except NoAnswerError:
        return None


def client_of(request: Request) -> bytes:
    """Return a digest of a client's key and address, which stands for the client."""
    host = request.client.host if request.client else ""
    return sha256(f"{request_key(request.headers)}\n{host}".encode()).digest()


def _add_model_list_routes(router: APIRouter, front: Front) -> None:
    def entry(request: Request, model: ManagedModel) -> dict[str, Any]:
        length = model.needs.max_model_len if model.needs else None
        if speaks_anthropic(request.scope):
            return anthropic_model(model.name, model.source.created, length)
        state = front.models.state_of(model)
        return listed(model.name, model.source.created, length) | state

    async def list_models(request: Request) -> dict[str, Any]:
        return models_answer(request, [entry(request, model) async for model in front.fitting()])

    async def get_model(request: Request, name: str) -> dict[str, Any]:
        model = await front.model_of(name)
        await front.models.fits(model)
        return entry(request, model)

    for path in LIST_PATHS:
        router.add_api_route(path, list_models, methods=["GET", "HEAD"])
    for base in ("/v1", ""):
        router.add_api_route(f"{base}/models/{{name:path}}", get_model, methods=["GET", "HEAD"])


def _add_operation_routes(router: APIRouter, front: Front, metrics: FrontMetrics) -> None:
    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return who_answers()

    @router.head("/api/hello", include_in_schema=False)  # Claude Code's first request
    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "draining" if front.drain.draining else "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Answer 200 once all pinned models are loaded."""
        if front.drain.draining:
            raise shutting_down()
        for model in front.models.models.values():
            if model.pinned and not model.loaded:
                raise unavailable(f"{model.name} is not loaded yet.")
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        metrics.draining = front.drain.draining
        page = await metrics.render_all(_scrape_headers(front))
        return Response(page, media_type=CONTENT_TYPE_LATEST)


def _scrape_headers(front: Front) -> Headers:
    """Return the headers of requests for a process's metrics, with a key if one is configured."""
    access = front.config.access
    keys = [access.scrape_key] if access.scrape_key else list(access.api_keys[:1])
    bearer = [(b"authorization", f"Bearer {key.get_secret_value()}".encode()) for key in keys]
    return [(b"host", b"localhost"), *bearer]
