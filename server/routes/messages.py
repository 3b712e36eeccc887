"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.prompting import ChatSpec, chat_prompt, count_tokens_of
from server.chat.salts import request_key
from server.chat.service import Service, parse
from server.protocol.messages.answer import MessageAnswer
from server.protocol.messages.request import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from server.routes.answering import respond
from server.routes.openapi import takes
from server.text.conversation import Conversation


def message_routes(service: Service) -> APIRouter:
    """Return the routes, for one service."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire = await parse(service, request, MessagesRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        key = request_key(request.headers)
        service.check_room(1, key=key)
        conversation = _conversation(service, request, wire)
        chat = ChatSpec(conversation, wire, wire.max_tokens)
        prompt = await chat_prompt(service, chat, key)
        answer = MessageAnswer(
            service.new_metadata("msg", "_"),
            len(prompt.ids),
            context_ends_it=prompt.params.max_tokens < wire.max_tokens,
            cache_report=wire.response_options.cache_report,
        )
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, Any]:
        wire = await parse(service, request, CountTokensRequest)
        service.check_model(wire.model)
        conversation = _conversation(service, request, wire)
        salt = service.salt(request, wire.cache_salt)
        return {"input_tokens": await count_tokens_of(service, conversation, "messages", salt)}

    return router


def _conversation(service: Service, request: Request, wire: ConversationFields) -> Conversation:
    """Read what both routes have in common. Raises ApiError."""
    config = service.config
    return wire.conversation(config.limits, config.reasoning, service.unseen(request, "messages"))
