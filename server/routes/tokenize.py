"""POST /tokenize and /detokenize, which use only the tokenizer."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.routes.answering import json_pieces, json_response
from server.routes.openapi import takes
from server.routes.service import Service
from server.text.pipeline import decoded_text


def add_routes(router: APIRouter, service: Service) -> None:
    reader, rules = service.reader, service.rules
    tokenizer, prompts = service.tokenizer, service.prompts
    # Only one text is encoded at a time, because its list of token ids may take much memory.
    tokenizing = asyncio.Lock()

    @router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        wire = await reader.read(request, TokenizeRequest)
        async with tokenizing:
            ids = await ids_of(request, wire)
            strings = await asyncio.to_thread(strings_of, ids) if wire.return_token_strs else None
            answer = {
                "count": len(ids),
                "max_model_len": rules.max_model_len,
                "tokens": list(ids),
                "token_strs": strings,
            }
            return await json_response(json_pieces(answer))

    async def ids_of(request: Request, wire: TokenizeRequest) -> tuple[int, ...]:
        """Return the tokens of the text or of the messages' prompt, which may have any length."""
        if wire.text is not None:
            encoded = await tokenizer.encode_text(
                wire.text, add_special_tokens=bool(wire.add_special_tokens)
            )
            return encoded.ids
        conversation = reader.conversation(request, wire, "chat")
        salt = reader.salt(request, wire)
        add_generation_prompt = conversation.continues or wire.add_generation_prompt is not False
        chat = await prompts.encode(
            conversation, "messages", salt, add_generation_prompt=add_generation_prompt
        )
        return chat.ids

    def strings_of(ids: tuple[int, ...]) -> list[str]:
        return [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]

    @router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        wire = await reader.read(request, DetokenizeRequest)
        rules.check_token_ids(wire.tokens, "tokens")
        text = (await asyncio.to_thread(decoded_text, tokenizer, wire.tokens)).text
        return JSONResponse({"prompt": text, "content": text})
