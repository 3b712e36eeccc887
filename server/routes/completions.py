"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import PrefixSalt
from server.chat.generation import Prompt
from server.chat.salts import request_key
from server.chat.service import Service, new_seed, parse
from server.protocol.common import answer_length
from server.protocol.completions.answer import Echo, TextAnswer
from server.protocol.completions.request import CompletionRequest, PromptText
from server.protocol.wire_errors import ContextOverflowError, too_many_tokens
from server.routes.answering import respond_to_all
from server.routes.openapi import takes
from server.text.detokenizer import decoded_text
from server.text.tokenizer import EncodedText, TextTooLongError


def completion_routes(service: Service) -> APIRouter:
    """Return the route, for one service; without /v1 for clients whose base URL has none."""
    router = APIRouter()

    @router.post("/completions", include_in_schema=False)
    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        wire = await parse(service, request, CompletionRequest)
        service.check_model(wire.model)
        wire.check(service.config.limits)
        key = request_key(request.headers)
        service.check_room(wire.response_options.choices, len(wire.prompts), key=key)
        encoded = await _all_encoded(service, wire)
        salt = service.salts.salt(key, wire.cache_salt)
        prompts = _prompts(service, wire, [text.ids for text in encoded], salt)
        answer = TextAnswer(
            service.new_metadata("cmpl"),
            service.tokenizer.token_bytes,
            wire.response_options,
            len(prompts),
            Echo(tuple(encoded), wire.logprobs is not None) if wire.echo else None,
        )
        return await respond_to_all(request, service, prompts, answer, stream=bool(wire.stream))

    return router


async def _all_encoded(service: Service, wire: CompletionRequest) -> list[EncodedText]:
    """Encode all prompts. Raises ApiError as ``_encoded`` does, and for too many of them."""
    found: list[EncodedText] = []
    total = 0
    for number, prompt in enumerate(wire.prompts):
        found.append(await _encoded(service, wire, prompt, wire.place(number)))
        total += len(found[-1].ids)
        if total > service.max_total_tokens:
            raise too_many_tokens(service.max_total_tokens, "prompt")
    return found


async def _encoded(
    service: Service, wire: CompletionRequest, prompt: PromptText, place: str
) -> EncodedText:
    """Encode a prompt; return its text as well, where that is echoed. Raises ApiError for a prompt
    that cannot be answered."""
    if isinstance(prompt, str):
        try:
            async with service.encoding:
                encoded = await service.tokenizer.encode_text(
                    prompt, service.max_model_len, offsets=bool(wire.echo)
                )
        except TextTooLongError as error:
            raise ContextOverflowError(None, service.max_model_len, place) from error
    else:
        service.check_token_ids(prompt, place)
        encoded = EncodedText("", tuple(prompt), ())
    service.check_prompt(encoded.ids, place)
    if wire.echo and not isinstance(prompt, str):
        return await asyncio.to_thread(decoded_text, service.tokenizer, encoded.ids)
    return encoded


def _prompts(
    service: Service, wire: CompletionRequest, all_ids: Sequence[tuple[int, ...]], salt: PrefixSalt
) -> list[Prompt]:
    """Return the prompts in the engine's form, each as if it came alone."""

    def prompt(ids: tuple[int, ...]) -> Prompt:
        params = wire.sampling_params(
            max_tokens=answer_length(
                wire.asked_length,
                len(ids),
                service.max_model_len,
                "max_tokens",
                least=0 if wire.echo else 1,
            ),
            logprobs=wire.logprobs,
            vocab_size=service.client.limits.vocab_size,
            defaults=service.model.defaults,
            stop_token_ids=service.model.stop_token_ids,
            fallback_seed=new_seed(),
        )
        return Prompt(
            ids,
            replace(params, prompt_logprobs=wire.prompt_logprobs),
            wire.stop_strings(),
            choices=wire.response_options.choices,
            salt=salt,
            priority=wire.priority or 0,
        )

    return [prompt(ids) for ids in all_ids]
