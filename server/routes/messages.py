"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.failures import REQUEST_ID_HEADER
from server.openapi import takes
from server.prompting import Asked, chat_prompt, encode_conversation
from server.protocol.messages.answer import MessageAnswer
from server.protocol.messages.errors import new_request_id
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.routes.answering import respond
from server.salts import request_key
from server.service import Service, parse


def message_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire = await parse(request, MessagesRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        service.check_room(1)
        conversation = wire.conversation(service.config.limits, service.config.reasoning)
        asked = Asked(conversation, wire, wire.max_tokens)
        prompt = await chat_prompt(service, asked, request_key(request.headers))
        answer = MessageAnswer(
            service.heading("msg", "_"),
            len(prompt.ids),
            context_ends_it=prompt.params.max_tokens < wire.max_tokens,
            cache_report=wire.wanted.cache_report,
        )
        response = await respond(request, service, prompt, answer, stream=bool(wire.stream))
        response.headers[REQUEST_ID_HEADER] = new_request_id()
        return response

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request, response: Response) -> dict[str, Any]:
        wire = await parse(request, CountTokensRequest)
        service.check_model(wire.model)
        conversation = wire.conversation(service.config.limits, service.config.reasoning)
        response.headers[REQUEST_ID_HEADER] = new_request_id()
        encoded = await encode_conversation(service, conversation, "messages")
        return {"input_tokens": len(encoded.ids)}

    return router
