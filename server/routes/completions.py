"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import PrefixSalt
from server.generation import Prompt
from server.openapi import takes
from server.protocol.common import answer_length
from server.protocol.completions import CompletionRequest
from server.protocol.errors import invalid
from server.protocol.text_answer import TextAnswer
from server.routes.answering import respond
from server.salts import request_key
from server.service import Service, new_seed, parse


def completion_routes(service: Service) -> APIRouter:
    """The route, for one service."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        wire = await parse(request, CompletionRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        service.check_room(wire.wanted.choices)
        salt = service.salts.salt(request_key(request.headers), wire.cache_salt)
        prompt = await _prompt(service, wire, salt)
        answer = TextAnswer(service.heading("cmpl"), service.tokenizer.token_bytes, wire.wanted)
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    return router


async def _prompt(service: Service, wire: CompletionRequest, salt: PrefixSalt) -> Prompt:
    """The prompt as the engine wants it."""
    vocab_size = service.client.limits.vocab_size
    if isinstance(wire.prompt, str):
        service.check_bytes(wire.prompt, "prompt")
        ids = await service.tokenizer.encode(wire.prompt)
    else:
        ids = tuple(wire.prompt)
        if max(ids) >= vocab_size:
            raise invalid(f"The prompt has a token id above {vocab_size - 1}.", "prompt")
    service.check_prompt(ids, "prompt")
    params = wire.sampling_params(
        max_tokens=answer_length(wire.asked_length, len(ids), service.max_model_len, "max_tokens"),
        logprobs=wire.logprobs,
        vocab_size=vocab_size,
        defaults=service.model.defaults,
        stop_token_ids=service.model.stop_token_ids,
        fallback_seed=new_seed(),
    )
    return Prompt(ids, params, wire.stop_strings(), choices=wire.wanted.choices, salt=salt)
