"""Ollama's API: version, tags, ps, show, chat, generate, embed."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.types import PrefixSalt
from server.chat.generation import Prompt
from server.metrics.answer_times import RequestTimes
from server.protocol.embeddings import Vectors, list_pieces
from server.protocol.ollama.answer import (
    Kind,
    OllamaAnswer,
    nanoseconds,
    ps_answer,
    show_answer,
    tags_answer,
    version_answer,
)
from server.protocol.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
    keep_alive_s,
)
from server.routes.answering import json_response
from server.routes.completions import encoded_text
from server.routes.embeddings import vectors_of
from server.routes.openapi import LINES, takes
from server.routes.reading import parse_body, read_json
from server.routes.service import Served, Service

PS, SHOW = "/api/ps", "/api/show"
KINDS: dict[str, Kind] = {"/api/chat": "chat", "/api/generate": "generate"}
BODIES: dict[Kind, type[OllamaChatRequest | OllamaGenerateRequest]] = {
    "chat": OllamaChatRequest,
    "generate": OllamaGenerateRequest,
}


def empty_answer(kind: Kind, model: str) -> OllamaAnswer:
    return OllamaAnswer(kind, model, bytes)


def add_model_routes(router: APIRouter, served: Served) -> None:
    async def version() -> dict[str, Any]:
        return version_answer()

    async def tags() -> dict[str, Any]:
        return tags_answer(await served.list_models())

    async def ps() -> dict[str, Any]:
        return ps_answer(await served.list_loaded())

    for path, answer in (("/api/version", version), ("/api/tags", tags), (PS, ps)):
        router.add_api_route(path, answer)
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.post(SHOW, openapi_extra=takes(ShowRequest))
    async def show(request: Request) -> dict[str, Any]:
        limits = served.config.limits
        wire = parse_body(ShowRequest, await read_json(request, limits))
        wire.check(limits)
        return show_answer(await served.describe_model(wire.model or wire.name))


def add_routes(router: APIRouter, service: Service) -> None:
    _add_answers(router, service)
    _add_vectors(router, service)


def _add_answers(router: APIRouter, service: Service) -> None:
    reader, rules, model = service.reader, service.rules, service.model

    async def prompt_of(
        request: Request, wire: OllamaChatRequest | OllamaGenerateRequest, salt: PrefixSalt
    ) -> Prompt:
        sampling = wire.sampling
        if not isinstance(wire, OllamaGenerateRequest) or not wire.raw:
            conversation = reader.conversation(request, wire, "ollama")
            return await service.prompts.prompt(conversation, sampling, salt)
        encoded = await encoded_text(service, wire.prompt or "", "prompt")
        rules.check_prompt(encoded.ids, "prompt")
        return Prompt(rules.request(sampling, encoded, salt), sampling.stop_strings())

    def add(path: str, kind: Kind) -> None:
        body_type = BODIES[kind]

        @router.post(path, name=kind, openapi_extra=takes(body_type, LINES))
        async def respond(request: Request) -> Response:
            wire = await reader.read(request, body_type)
            if wire.only_loads:  # the model is always loaded while the engine runs
                if not service.client.alive:
                    raise service.admission.no_engine()
                unloads = keep_alive_s(wire.keep_alive) == 0
                return JSONResponse(empty_answer(kind, model.id).nothing(unloads=unloads))
            salt = reader.salt(request, wire)
            service.admission.check_answers(salt.tenant)
            answer = OllamaAnswer(kind, model.id, service.tokenizer.token_bytes)
            prompt = await prompt_of(request, wire, salt)
            # A stream is this API's default.
            stream = wire.stream is not False
            return await service.answering.respond(request, answer, prompt, stream=stream)

    for path, kind in KINDS.items():
        add(path, kind)


def _add_vectors(router: APIRouter, service: Service) -> None:
    reader, model = service.reader, service.model

    @router.post("/api/embed", openapi_extra=takes(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        wire = await reader.read(request, OllamaEmbedRequest)
        times: RequestTimes = request.state.times
        if (neutral := wire.neutral) is None:
            return JSONResponse({"model": model.id, "embeddings": []})
        neutral.check(service.config.limits)
        vectors, tokens = await vectors_of(service, request, neutral)
        head = {
            "model": model.id,
            "total_duration": nanoseconds(times.elapsed_s),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }
        return await json_response(list_pieces(head, "embeddings", map(Vectors.tolist, vectors)))

    @router.post("/api/embeddings", openapi_extra=takes(OllamaEmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        wire = await reader.read(request, OllamaEmbeddingsRequest)
        if (neutral := wire.neutral) is None:
            return JSONResponse({"embedding": []})
        (vector,), _ = await vectors_of(service, request, neutral)
        return JSONResponse({"embedding": vector.tolist()})
