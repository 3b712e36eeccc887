"""Ollama's API for several models: routes that list and show models, and requests to unload one."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.protocol.ollama.answer import Kind, Loaded, ModelInfo, OllamaAnswer
from server.protocol.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    keep_alive_s,
)
from server.protocol.wire_errors import UnknownModelError
from server.routes.answering import sign_of_life
from server.routes.ollama import PS, add_list_routes
from server.routes.reading import parse_body, read_json
from server.supervisor.forward import StreamStart, not_loaded, sent_headers
from server.supervisor.front import Front
from server.supervisor.models import Abilities, ManagedModel
from server.supervisor.process import Headers, LoadError, ModelProcess, NoAnswerError

Parse = Callable[[bytes], OllamaChatRequest | OllamaGenerateRequest]
BODIES: dict[str, tuple[Kind, Parse]] = {
    "/api/chat": ("chat", OllamaChatRequest.model_validate_json),
    "/api/generate": ("generate", OllamaGenerateRequest.model_validate_json),
}
NO_ABILITIES = Abilities((), "")


def add_info_routes(router: APIRouter, front: Front) -> None:
    """Add the routes of Ollama's API that the front answers without a model's process."""

    async def fitting() -> list[ModelInfo]:
        return [info_of(front, model) async for model in front.fitting()]

    async def loaded(request: Request) -> list[ModelInfo]:
        headers = sent_headers(request)
        running = [(model, model.process) for model in front.models.loaded if model.process]
        sizes = await asyncio.gather(*(taken_bytes(process, headers) for _, process in running))
        return [
            replace(info_of(front, model), loaded=state_of(front, model, size_bytes))
            for (model, _), size_bytes in zip(running, sizes, strict=True)
            if model.loaded
        ]

    async def info_for(request: Request) -> ModelInfo:
        limits = front.config.limits
        body = await read_json(request, limits)
        wire = parse_body(ShowRequest.model_validate_json, body)
        wire.check(limits)
        model = await front.model_of(wire.model or wire.name)
        if not await front.models.fits(model):
            raise UnknownModelError(model.name)
        try:
            loop = asyncio.get_running_loop()
            abilities = await loop.run_in_executor(front.templates, model.source.abilities)
        except LoadError as error:
            raise not_loaded(model.name, error) from error
        return info_of(front, model, abilities)

    add_list_routes(router, fitting, loaded, info_for)


def info_of(front: Front, model: ManagedModel, abilities: Abilities = NO_ABILITIES) -> ModelInfo:
    assert model.needs is not None
    return ModelInfo(
        model.name,
        model.source.facts(),
        model.needs.max_model_len,
        abilities.capabilities,
        template=abilities.template,
    )


def state_of(front: Front, model: ManagedModel, size_bytes: int | None) -> Loaded:
    """Return a loaded model's state. If ``size_bytes`` is None, since the process is busy or hangs,
    use the most that the model may take, because Ollama's clients expect a number."""
    assert model.needs is not None
    wait_s = front.models.kept_for_s(model)
    until = None if wait_s is None else datetime.now(UTC) + timedelta(seconds=wait_s)
    max_bytes = model.held_bytes
    size_bytes = max_bytes if size_bytes is None else size_bytes
    return Loaded(size_bytes, max_bytes, on_gpu=model.needs.on_gpu, expires_at=until)


async def taken_bytes(process: ModelProcess, headers: Headers) -> int | None:
    """Ask a model's process how much memory it takes now. Return None if it does not answer."""
    with suppress(NoAnswerError):
        answer = await process.get(PS.encode(), headers)
        if answer.status == 200:
            return int(from_json(answer.content)["models"][0]["size"])
    return None


async def unload(
    front: Front, model: ManagedModel, request: Request, body: bytes
) -> Response | None:
    """Unload a model and return the answer. Return None if the request is for anything else."""
    if (known := BODIES.get(request.url.path)) is None:
        return None
    kind, parse = known
    wire = parse_body(parse, body)
    if not (wire.only_loads and wire.unloads):
        return None
    wire.check(front.config.limits)
    unloads = await front.models.stop_model(model)
    answer = OllamaAnswer(kind, model.name, bytes)
    return JSONResponse(answer.nothing(unloads=unloads))


def wanted_keep_alive_s(value: object) -> float | None:
    """Return the seconds that a request's keep_alive means, or None if the value is invalid."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return keep_alive_s(value)


def line_stream(path: str, model: str) -> StreamStart | None:
    """Return how a stream of JSON lines begins, or None if the path's answers are not streamed.
    The first line has an empty text, since clients parse every line as JSON."""
    if path not in BODIES:
        return None
    answer = OllamaAnswer(BODIES[path][0], model, bytes)
    media_type = answer.stream_form.media_type.encode()
    return StreamStart(media_type, sign_of_life(answer), begins_at_once=True)
