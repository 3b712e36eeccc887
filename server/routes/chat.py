"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import PrefixSalt
from server.generation import Prompt
from server.protocol.answers import ChatAnswer
from server.protocol.chat import ChatRequest
from server.protocol.common import answer_length
from server.protocol.errors import invalid
from server.routes.answering import respond
from server.service import Service, new_seed, parse
from server.text.tokenizer import TemplateError


def chat_routes(service: Service) -> APIRouter:
    """The route, for one service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        wire = await parse(request, ChatRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        service.check_room(wire.wanted.choices)
        salt = service.salts.salt(request.headers.get("authorization"), wire.cache_salt)
        prompt = await _prompt(service, wire, salt)
        answer = ChatAnswer(service.heading("chatcmpl"), service.tokenizer.token_bytes, wire.wanted)
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    return router


async def _prompt(service: Service, wire: ChatRequest, salt: PrefixSalt) -> Prompt:
    """The conversation as the engine wants it."""
    if not service.tokenizer.has_template:
        raise invalid("This model has no chat template; use /v1/completions.", "messages")
    messages = wire.conversation()
    service.check_bytes("".join(str(message["content"]) for message in messages), "messages")
    try:
        encoded = await service.tokenizer.encode_chat(messages, wire.enable_thinking)
    except TemplateError as error:
        raise invalid(f"{error}.", "messages") from error
    service.check_prompt(encoded.ids, "messages")
    asked, field = wire.asked_length
    params = wire.sampling_params(
        max_tokens=answer_length(asked, len(encoded.ids), service.max_model_len, field),
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        vocab_size=service.client.limits.vocab_size,
        defaults=service.model.defaults,
        stop_token_ids=service.model.stop_token_ids,
        fallback_seed=new_seed(),
    )
    return Prompt(
        encoded.ids,
        params,
        wire.stop_strings(),
        encoded.text,
        choices=wire.wanted.choices,
        salt=salt,
        system_tokens=encoded.system_tokens,
    )
