"""POST /tokenize and /detokenize. The engine is not asked."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.chat.prompting import encode_conversation
from server.chat.service import Service, parse
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.routes.json_response import json_pieces, json_response
from server.routes.openapi import takes
from server.text.detokenizer import decoded_text


def tokenize_routes(service: Service) -> APIRouter:
    """Return the routes, for one service."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        wire = await parse(service, request, TokenizeRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        async with service.tokenizing:
            ids = await _ids(service, request, wire)
            strings = (
                await asyncio.to_thread(_strings, service, ids) if wire.return_token_strs else None
            )
            answer = {
                "count": len(ids),
                "max_model_len": service.max_model_len,
                "tokens": list(ids),
                "token_strs": strings,
            }
            return await json_response(json_pieces(answer))

    @router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        wire = await parse(service, request, DetokenizeRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        service.check_token_ids(wire.tokens, "tokens")
        text = (await asyncio.to_thread(decoded_text, service.tokenizer, wire.tokens)).text
        return JSONResponse({"prompt": text, "content": text})

    return router


async def _ids(service: Service, request: Request, wire: TokenizeRequest) -> tuple[int, ...]:
    """Encode the text, or the prompt that the messages make; however many ids it has."""
    if wire.text is not None:
        encoded = await service.tokenizer.encode_text(
            wire.text, add_special_tokens=bool(wire.add_special_tokens)
        )
        return encoded.ids
    config, unseen = service.config, service.unseen(request, "chat")
    conversation = wire.conversation(config.limits, config.reasoning, unseen)
    salt = service.salt(request, wire.cache_salt)
    add_generation_prompt = conversation.continues or wire.add_generation_prompt is not False
    chat = await encode_conversation(
        service, conversation, "messages", salt, add_generation_prompt=add_generation_prompt
    )
    return chat.ids


def _strings(service: Service, ids: tuple[int, ...]) -> list[str]:
    return [service.tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
