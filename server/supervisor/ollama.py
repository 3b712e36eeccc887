"""Ollama's lists of several models, loaded or not, and what unloads one."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.protocol.ollama.answer import (
    Durations,
    Kind,
    Loaded,
    ModelInfo,
    OllamaAnswer,
    ps_answer,
    show_answer,
    tags_answer,
    version_answer,
)
from server.protocol.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    keep_alive_s,
)
from server.protocol.wire_errors import UnknownModelError, from_validation
from server.routes.answering import LineFraming
from server.supervisor.errors import LoadError, not_loaded
from server.supervisor.front import Front
from server.supervisor.models import Abilities, ManagedModel

SHOW = "/api/show"
BODIES: dict[str, tuple[Kind, type[OllamaChatRequest | OllamaGenerateRequest]]] = {
    "/api/chat": ("chat", OllamaChatRequest),
    "/api/generate": ("generate", OllamaGenerateRequest),
}
NO_TIME = Durations(0.0, 0.0, 0.0)
NO_ABILITIES = Abilities((), "")
Body = Callable[[Request], Awaitable[bytes]]


def ollama_list_routes(front: Front, body_of: Body) -> APIRouter:
    """Return the routes that need no model's process. body_of: reads a request's body."""
    router = APIRouter()

    async def version() -> dict[str, Any]:
        return version_answer()

    async def tags() -> dict[str, Any]:
        return tags_answer([await info_of(front, its) async for its in front.fitting()])

    async def ps() -> dict[str, Any]:
        return ps_answer([await info_of(front, model) for model in front.models.loaded])

    for path, answer in (("version", version), ("tags", tags), ("ps", ps)):
        router.add_api_route(f"/api/{path}", answer, methods=["GET", "HEAD"])

    @router.post(SHOW)
    async def show(request: Request) -> dict[str, Any]:
        body = await body_of(request)
        try:
            wire = ShowRequest.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error, body) from error
        wire.check(front.config.limits)
        model = await front.model_of(wire.model or wire.name)
        if not await front.models.fits(model):
            raise UnknownModelError(model.name)
        try:
            loop = asyncio.get_running_loop()
            abilities = await loop.run_in_executor(front.templates, model.source.abilities)
        except LoadError as error:
            raise not_loaded(model.name, error) from error
        return show_answer(await info_of(front, model, abilities))

    return router


async def info_of(
    front: Front, model: ManagedModel, abilities: Abilities = NO_ABILITIES
) -> ModelInfo:
    assert model.needs is not None
    facts = model.source.facts()
    loaded = None
    if model.loaded:
        wait_s = front.models.kept_for_s(model)
        until = None if wait_s is None else datetime.now(UTC) + timedelta(seconds=wait_s)
        loaded = Loaded(model.held_bytes, on_gpu=model.needs.on_gpu, expires_at=until)
    return ModelInfo(
        model.name,
        facts,
        model.needs.max_model_len,
        abilities.capabilities,
        loaded=loaded,
        template=abilities.template,
    )


async def unloaded(
    front: Front, model: ManagedModel, request: Request, body: bytes
) -> Response | None:
    """Unload the model where that is all that a request asks for, and answer it; None where it asks
    for more."""
    kind, body_type = BODIES.get(request.url.path, (None, None))
    if kind is None or body_type is None:
        return None
    try:
        wire = body_type.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, body) from error
    if not (wire.only_loads and wire.unloads):
        return None
    wire.check(front.config.limits)
    unloads = await front.models.stop_model(model)
    answer = OllamaAnswer(kind, model.name, bytes, lambda: NO_TIME)
    return JSONResponse(answer.nothing(unloads=unloads))


def kept_s(value: object) -> float | None:
    """Return for how many seconds a request wants its model to be kept; None where it does not say
    so, or not in a way that its model would accept."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return keep_alive_s(value)


def empty_line(path: str, model: str) -> bytes | None:
    """Return an object without text in a line, which tells that somebody is there: clients read
    every line as JSON. None for a path that answers in one object."""
    if path not in BODIES:
        return None
    answer = OllamaAnswer(BODIES[path][0], model, bytes, lambda: NO_TIME)
    return LineFraming().sign_of_life(answer)
