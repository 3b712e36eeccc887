"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.prompting import ChatSpec
from server.protocol.chat.answer import ChatAnswer
from server.protocol.chat.request import ChatRequest
from server.routes.openapi import takes
from server.routes.service import Service


def chat_routes(service: Service) -> APIRouter:
    """Return the route, for one service; without /v1 for clients whose base URL has none."""
    router = APIRouter()
    reader, answering = service.reader, service.answering
    model, prompts, token_bytes = service.model, service.prompts, service.tokenizer.token_bytes

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        wire, salt = await reader.admit(request, ChatRequest)
        max_tokens, param = wire.asked_length
        chat = ChatSpec(
            reader.conversation(request, wire, "chat"),
            wire,
            max_tokens,
            param,
            (wire.top_logprobs or 0) if wire.logprobs else None,
        )
        prompt = await prompts.prompt(chat, salt)
        answer = ChatAnswer(
            model.new_metadata("chatcmpl"),
            token_bytes,
            wire.response_options,
            prompt.ids if wire.return_token_ids else None,
        )
        return await answering.respond(request, answer, prompt, stream=wire.stream)

    return router
