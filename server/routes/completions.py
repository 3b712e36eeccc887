"""POST /v1/chat/completions, /v1/completions, /v1/messages and /v1/messages/count_tokens."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.generation import Prompt
from server.protocol.chat.answer import ChatAnswer
from server.protocol.chat.request import ChatRequest
from server.protocol.completions import CompletionRequest, Echo, PromptText, TextAnswer
from server.protocol.messages.answer import MessageAnswer
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.protocol.wire_errors import ContextOverflowError, too_many_tokens
from server.routes.openapi import takes
from server.routes.service import Service
from server.text.pipeline import decoded_text
from server.text.tokenizer import EncodedText, TextTooLongError


def add_routes(router: APIRouter, service: Service) -> None:
    _add_chat_routes(router, service)
    _add_completion_routes(router, service)
    _add_message_routes(router, service)


def _add_message_routes(router: APIRouter, service: Service) -> None:
    reader, answering = service.reader, service.answering
    model, prompts = service.model, service.prompts

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire, salt = await reader.admit(request, MessagesRequest)
        conversation = reader.conversation(request, wire, "messages")
        prompt = await prompts.prompt(conversation, wire, salt)
        answer = MessageAnswer(
            model.new_metadata("msg", "_"),
            len(prompt.ids),
            service.client.limits.kept_tokens(len(prompt.ids)),
            counts_cache=wire.counts_cache,
            context_ends_it=prompt.params.max_tokens < wire.max_tokens,
            cache_report=wire.response_options.cache_report,
        )
        return await answering.respond(request, answer, prompt, stream=wire.stream)

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, Any]:
        wire = await reader.read(request, CountTokensRequest)
        conversation = reader.conversation(request, wire, "messages")
        salt = reader.salt(request, wire)
        return {"input_tokens": await prompts.count_tokens(conversation, "messages", salt)}


def _add_chat_routes(router: APIRouter, service: Service) -> None:
    """Add the route with and without /v1, which some clients leave out."""
    reader, answering = service.reader, service.answering
    model, prompts, token_bytes = service.model, service.prompts, service.tokenizer.token_bytes

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        wire, salt = await reader.admit(request, ChatRequest)
        prompt = await prompts.prompt(reader.conversation(request, wire, "chat"), wire, salt)
        answer = ChatAnswer(
            model.new_metadata("chatcmpl"),
            token_bytes,
            wire.response_options,
            prompt.ids if wire.return_token_ids else None,
        )
        return await answering.respond(request, answer, prompt, stream=wire.stream)


def _add_completion_routes(router: APIRouter, service: Service) -> None:
    """Add the route with and without /v1, which some clients leave out."""
    reader, answering = service.reader, service.answering

    @router.post("/completions", include_in_schema=False)
    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        wire, salt = await reader.admit(request, CompletionRequest)
        encoded = await _all_encoded(service, wire)
        requests = [service.rules.request(wire, text, salt) for text in encoded]
        prompts = [Prompt(each, wire.stop_strings()) for each in requests]
        answer = TextAnswer(
            service.model.new_metadata("cmpl"),
            service.tokenizer.token_bytes,
            wire.response_options,
            len(prompts),
            Echo(tuple(encoded), wire.logprobs is not None) if wire.echo else None,
            tuple(text.ids for text in encoded) if wire.return_token_ids else (),
        )
        return await answering.respond(request, answer, *prompts, stream=wire.stream)


async def _all_encoded(service: Service, wire: CompletionRequest) -> list[EncodedText]:
    """Encode all prompts. Raises ApiError for an invalid prompt or too many tokens in total."""
    encoded: list[EncodedText] = []
    total, limit = 0, service.rules.max_total_tokens
    for number, prompt in enumerate(wire.prompts):
        encoded.append(await _encoded(service, wire, prompt, wire.place(number)))
        total += len(encoded[-1].ids)
        if total > limit:
            raise too_many_tokens(limit, "prompt")
    return encoded


async def encoded_text(
    service: Service, text: str, place: str, *, offsets: bool = False
) -> EncodedText:
    """Encode a prompt, which ``place`` names in errors. Raises ApiError for too many tokens."""
    limit = service.rules.max_model_len
    try:
        async with service.encoding:
            return await service.tokenizer.encode_text(text, limit, offsets=offsets)
    except TextTooLongError as error:
        raise ContextOverflowError(error.tokens, limit, place, estimated=True) from error


async def _encoded(
    service: Service, wire: CompletionRequest, prompt: PromptText, place: str
) -> EncodedText:
    """Encode a prompt. Token ids are decoded only if the answer echoes the text."""
    rules = service.rules
    if isinstance(prompt, str):
        encoded = await encoded_text(service, prompt, place, offsets=bool(wire.echo))
    else:
        rules.check_token_ids(prompt, place)
        encoded = EncodedText("", tuple(prompt))
    rules.check_prompt(encoded.ids, place)
    if wire.echo and not isinstance(prompt, str):
        return await asyncio.to_thread(decoded_text, service.tokenizer, encoded.ids)
    return encoded
