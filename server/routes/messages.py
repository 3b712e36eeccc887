"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.openapi import takes
from server.prompting import Asked, chat_prompt, count_tokens_of
from server.protocol.messages.answer import MessageAnswer
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.routes.answering import respond
from server.salts import request_key
from server.service import Service, parse


def message_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire = await parse(service, request, MessagesRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        key = request_key(request.headers)
        service.check_room(1, key=key)
        conversation = wire.conversation(service.config.limits, service.config.reasoning)
        asked = Asked(conversation, wire, wire.max_tokens)
        prompt = await chat_prompt(service, asked, key)
        answer = MessageAnswer(
            service.heading("msg", "_"),
            len(prompt.ids),
            context_ends_it=prompt.params.max_tokens < wire.max_tokens,
            cache_report=wire.wanted.cache_report,
        )
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, Any]:
        wire = await parse(service, request, CountTokensRequest)
        service.check_model(wire.model)
        conversation = wire.conversation(service.config.limits, service.config.reasoning)
        return {"input_tokens": await count_tokens_of(service, conversation, "messages")}

    return router
