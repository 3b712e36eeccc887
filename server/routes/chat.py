"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.prompting import ChatSpec, chat_prompt
from server.chat.salts import request_key
from server.chat.service import Service, parse
from server.protocol.chat.answer import ChatAnswer
from server.protocol.chat.request import ChatRequest
from server.routes.answering import respond
from server.routes.openapi import takes


def chat_routes(service: Service) -> APIRouter:
    """Return the route, for one service; without /v1 for clients whose base URL has none."""
    router = APIRouter()

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        wire = await parse(service, request, ChatRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        key = request_key(request.headers)
        service.check_room(wire.response_options.choices, key=key)
        max_tokens, param = wire.asked_length
        config, unseen = service.config, service.unseen(request, "chat")
        chat = ChatSpec(
            wire.conversation(config.limits, config.reasoning, unseen),
            wire,
            max_tokens,
            param,
            (wire.top_logprobs or 0) if wire.logprobs else None,
        )
        prompt = await chat_prompt(service, chat, key)
        answer = ChatAnswer(
            service.new_metadata("chatcmpl"), service.tokenizer.token_bytes, wire.response_options
        )
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    return router
