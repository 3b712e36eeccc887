"""Ollama's API for a server of one model: version, tags, ps, show, chat, generate, embed."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.types import PrefixSalt, Submission
from server.chat.generation import Prompt
from server.chat.prompting import ChatSpec
from server.metrics.answer_times import RequestTimes
from server.protocol.embeddings import Vectors, list_pieces
from server.protocol.ollama.answer import (
    Kind,
    Loaded,
    ModelInfo,
    OllamaAnswer,
    capabilities,
    nanoseconds,
    ps_answer,
    show_answer,
    tags_answer,
    version_answer,
)
from server.protocol.ollama.request import (
    LENGTH_PARAM,
    AnswerFields,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from server.routes.answering import CLIENT_CLOSED_REQUEST, json_response
from server.routes.completions import encoded_text
from server.routes.embeddings import vectors_of
from server.routes.openapi import LINES, takes
from server.routes.service import Service

PS = "/api/ps"


def add_routes(router: APIRouter, service: Service) -> None:
    async def infos() -> list[ModelInfo]:
        return [info_of(service)]

    async def info_for(request: Request) -> ModelInfo:
        wire = await service.reader.read(request, ShowRequest)
        service.model.check(wire.name)
        return info_of(service)

    add_list_routes(router, infos, lambda _: infos(), info_for)
    _add_answers(router, service)
    _add_vectors(router, service)


def info_of(service: Service) -> ModelInfo:
    template, kv, facts = service.tokenizer.template, service.client.stats.kv, service.model.facts
    return ModelInfo(
        service.model.id,
        facts,
        service.rules.max_model_len,
        capabilities(
            embeds=service.client.limits.embedding_size is not None,
            calls=template.tool_format is not None,
            thinks=template.knows_thoughts,
        ),
        loaded=Loaded(
            facts.weights_bytes + (0 if kv is None else kv.committed_bytes),
            facts.fixed_bytes + (0 if kv is None else kv.capacity_bytes),
            on_gpu=facts.on_gpu,
        ),
        template=template.text,
    )


def add_list_routes(
    router: APIRouter,
    all_infos: Callable[[], Awaitable[list[ModelInfo]]],
    loaded_infos: Callable[[Request], Awaitable[list[ModelInfo]]],
    info_for: Callable[[Request], Awaitable[ModelInfo]],
) -> None:
    """Add /api/version, tags, ps and show. ``info_for`` finds the model that a request names."""

    async def version() -> dict[str, Any]:
        return version_answer()

    async def tags() -> dict[str, Any]:
        return tags_answer(await all_infos())

    async def ps(request: Request) -> dict[str, Any]:
        return ps_answer(await loaded_infos(request))

    for path, answer in (("/api/version", version), ("/api/tags", tags), (PS, ps)):
        router.add_api_route(path, answer)
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.post("/api/show", openapi_extra=takes(ShowRequest))
    async def show(request: Request) -> dict[str, Any]:
        return show_answer(await info_for(request))


def _add_answers(router: APIRouter, service: Service) -> None:
    reader, prompts, answering = service.reader, service.prompts, service.answering

    @router.post("/api/chat", openapi_extra=takes(OllamaChatRequest, LINES))
    async def chat(request: Request) -> Response:
        wire = await reader.read(request, OllamaChatRequest)
        answer = new_answer("chat")
        if wire.only_loads:
            return loaded(wire, answer)
        prompt = await templated(request, wire, admitted(request, wire))
        return await answering.respond(request, answer, prompt, stream=wire.streams)

    @router.post("/api/generate", openapi_extra=takes(OllamaGenerateRequest, LINES))
    async def generate(request: Request) -> Response:
        wire = await reader.read(request, OllamaGenerateRequest)
        answer = new_answer("generate")
        if wire.only_loads:
            return loaded(wire, answer)
        salt = admitted(request, wire)
        make = raw if wire.raw else templated
        prompt = await make(request, wire, salt)
        return await answering.respond(request, answer, prompt, stream=wire.streams)

    def admitted(request: Request, wire: AnswerFields) -> PrefixSalt:
        salt = reader.salt(request, wire.cache_salt)
        service.admission.check_answers(salt.tenant)
        return salt

    def loaded(wire: AnswerFields, answer: OllamaAnswer) -> Response:
        """Answer a request to load the model, which is always loaded while the engine runs."""
        if not service.client.alive:
            raise service.admission.no_engine()
        return JSONResponse(answer.nothing(unloads=wire.unloads))

    def new_answer(kind: Kind) -> OllamaAnswer:
        return OllamaAnswer(kind, service.model.id, service.tokenizer.token_bytes)

    async def templated(
        request: Request, wire: OllamaChatRequest | OllamaGenerateRequest, salt: PrefixSalt
    ) -> Prompt:
        conversation, options = reader.conversation(request, wire, "ollama"), wire.chosen_options
        spec = ChatSpec(
            conversation, options.sampling, options.max_tokens, LENGTH_PARAM, wire.num_logprobs
        )
        return await prompts.prompt(spec, salt)

    async def raw(_: Request, wire: OllamaGenerateRequest, salt: PrefixSalt) -> Prompt:
        rules, options = service.rules, wire.chosen_options
        ids = (await encoded_text(service, wire.prompt or "", "prompt")).ids
        rules.check_prompt(ids, "prompt")
        sampling = options.sampling
        params = rules.sampling_params(
            sampling, len(ids), options.max_tokens, LENGTH_PARAM, wire.num_logprobs
        )
        return Prompt(Submission(ids, (params,), salt=salt), sampling.stop_strings())


def _add_vectors(router: APIRouter, service: Service) -> None:
    reader, model = service.reader, service.model

    @router.post("/api/embed", openapi_extra=takes(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        wire = await reader.read(request, OllamaEmbedRequest)
        times: RequestTimes = request.state.times
        if (neutral := wire.neutral) is None:
            return JSONResponse({"model": model.id, "embeddings": []})
        neutral.check(service.config.limits)
        if (made := await vectors_of(service, request, neutral)) is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        vectors, tokens = made
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
        if (made := await vectors_of(service, request, neutral)) is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        (vector,) = made[0]
        return JSONResponse({"embedding": vector.tolist()})
