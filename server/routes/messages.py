"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.prompting import ChatSpec
from server.protocol.messages.answer import MessageAnswer
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.routes.openapi import takes
from server.routes.service import Service


def message_routes(service: Service) -> APIRouter:
    router = APIRouter()
    reader, answering = service.reader, service.answering
    model, prompts = service.model, service.prompts

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire, salt = await reader.admit(request, MessagesRequest)
        conversation = reader.conversation(request, wire, "messages")
        prompt = await prompts.prompt(ChatSpec(conversation, wire, wire.max_tokens), salt)
        answer = MessageAnswer(
            model.new_metadata("msg", "_"),
            len(prompt.ids),
            context_ends_it=prompt.params.max_tokens < wire.max_tokens,
            cache_report=wire.response_options.cache_report,
        )
        return await answering.respond(request, answer, prompt, stream=wire.stream)

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, Any]:
        wire = await reader.read(request, CountTokensRequest)
        conversation = reader.conversation(request, wire, "messages")
        salt = reader.salt(request, wire.cache_salt)
        return {"input_tokens": await prompts.count_tokens(conversation, "messages", salt)}

    return router
