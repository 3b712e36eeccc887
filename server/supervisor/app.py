"""Makes the HTTP application of the front, which forwards requests to the models' processes."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.http.app import app_of, in_background, release_when_idle
from server.metrics.answer_times import RecentRequests
from server.protocol.common import limits_by_path
from server.protocol.ollama.request import keep_alive_s
from server.protocol.wire_errors import ApiError, unavailable
from server.routes.ollama import BODIES, KINDS, SHOW, empty_answer
from server.routes.reading import parse_body, read_json
from server.supervisor.forward import ForwardedAnswer, sent_headers, stream_start, target_of
from server.supervisor.front import Front, failure_of
from server.supervisor.models import ManagedModel, NoRoomError
from server.supervisor.process import LoadError, NoAnswerError

MEMORY = "/memory"
STORED_RESPONSE = "/v1/responses/{response_id}"
# Matches a percent-encoded path, since paths are forwarded as the client sent them.
STORED_TARGET = re.compile(rb"/v1/responses/[A-Za-z0-9_-]{1,64}(?=[/?]|\Z)")


def create_front(front: Front) -> FastAPI:
    """Make the ASGI app. It loads the pinned models at start, and ends all models at shutdown."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        releasing = release_when_idle(front.drain, inf, lambda: None)
        async with in_background(
            front.models.keep_time(), front.keep_awake(), load_pinned(front), releasing
        ):
            yield
        await front.models.close()

    app = app_of(front, RecentRequests(), lifespan=lifespan, openapi_url=None)
    _add_forwarding_routes(app.router, front)
    return app


async def load_pinned(front: Front) -> None:
    for model in list(front.models.models.values()):
        if model.pinned:
            with suppress(LoadError, NoRoomError):  # the supervisor has logged the error
                await front.models.load(model)


class BodyHead(BaseModel):
    """The fields that the front reads in the body of a request."""

    model: str | None = None
    stream: Any = None
    keep_alive: Any = None

    @property
    def keep_alive_s(self) -> float | None:
        """The seconds that ``keep_alive`` means, or None for a value of another type."""
        is_time = isinstance(self.keep_alive, int | float | str)
        is_time = is_time and not isinstance(self.keep_alive, bool)
        return keep_alive_s(self.keep_alive) if is_time else None


def _add_forwarding_routes(router: APIRouter, front: Front) -> None:
    limits = front.config.limits

    async def model_of(request: Request, name: str | None) -> ManagedModel:
        """Return the model that a client names, and note it for the log. Raises ApiError (404)."""
        model = await front.model_of(name)
        request.state.model = model.name
        return model

    async def forward(request: Request) -> Response:
        body, path = await read_json(request, limits), request.url.path
        head = parse_body(BodyHead, body)
        model, keep_s = await model_of(request, head.model), head.keep_alive_s
        if keep_s == 0 and (answer := await unload(model, path, body)) is not None:
            return answer
        stream = stream_start(path, model.name, head.stream)
        return ForwardedAnswer(front, request, model, body, stream, keep_s)

    async def unload(model: ManagedModel, path: str, body: bytes) -> Response | None:
        """Unload a model and return the answer. Return None if the request is for an answer."""
        if (kind := KINDS.get(path)) is None:
            return None
        wire = parse_body(BODIES[kind], body)
        if not wire.only_loads:
            return None
        wire.check(limits)
        unloads = await front.models.stop_model(model)
        return JSONResponse(empty_answer(kind, model.name).nothing(unloads=unloads))

    async def look(request: Request) -> Response:
        """Forward a request to the query's model, or else to the last used model. Load no model."""
        model = await model_of(request, request.query_params.get("model"))
        if not model.loaded and request.url.path == MEMORY:
            state = front.models.state_of(model)
            return JSONResponse({"model": model.name, **state, "requests": [], "map": None})
        if not model.loaded:
            raise unavailable(f"{model.name} is not loaded; the next request to it loads it.")
        return ForwardedAnswer(front, request, model)

    async def stored(request: Request) -> Response:
        """Forward a request to the loaded model that stores the response in the path."""
        body = await request.body()
        model = await model_with_response(front, request)
        request.state.model = model.name
        return ForwardedAnswer(front, request, model, body)

    for path in limits_by_path(limits).keys() - {SHOW}:
        router.add_api_route(path, forward, methods=["POST"])
    for path in (MEMORY, "/openapi.json"):
        router.add_api_route(path, look, methods=["GET"])
    router.add_api_route(STORED_RESPONSE, stored, methods=["GET", "DELETE"])
    router.add_api_route(f"{STORED_RESPONSE}/{{rest:path}}", stored, methods=["GET", "POST"])


async def model_with_response(front: Front, request: Request) -> ManagedModel:
    """Return the loaded model that stores the response in the path. Raises ApiError (404, 503)."""
    error = ApiError(404, "No model that is loaded has this response.", type="not_found_error")
    if (target := STORED_TARGET.match(target_of(request.scope))) is None:
        raise error
    for model, answer in await front.models.ask_loaded(target[0], sent_headers(request)):
        if answer is None:
            error = failure_of(model.name, NoAnswerError(unasked=False))
        elif answer.status == 200:
            return model
    raise error
