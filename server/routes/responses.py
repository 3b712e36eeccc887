"""POST /v1/responses, and the routes of stored responses."""

from collections.abc import Callable
from secrets import token_hex

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.chat.response_store import ResponseStore, StoredResponse
from server.protocol.answers import Json
from server.protocol.responses.answer import ResponseAnswer
from server.protocol.responses.items import Item
from server.protocol.responses.request import ResponsesRequest
from server.protocol.wire_errors import invalid
from server.routes.answering import json_pieces, json_response
from server.routes.openapi import takes
from server.routes.service import Service
from server.text.conversation import Conversation

MAX_LISTED_ITEMS = 100
LISTED_ITEMS = 20
ID_BYTES = 12


def add_routes(router: APIRouter, service: Service) -> None:
    reader, answering = service.reader, service.answering
    model, prompts, token_bytes = service.model, service.prompts, service.tokenizer.token_bytes
    limits = service.config.limits
    store = ResponseStore(limits.max_stored_response_bytes)

    def conversation_of(
        request: Request, wire: ResponsesRequest
    ) -> tuple[tuple[Json, ...], list[Item], Conversation]:
        unsupported = reader.unsupported(request, "responses")
        return store.conversation(reader.tenant(request), wire, limits, unsupported)

    @router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        wire, salt = await reader.admit(request, ResponsesRequest)
        wire = store.with_retention(salt.tenant, wire)
        history, items, conversation = conversation_of(request, wire)
        prompt = await prompts.prompt(conversation, wire, reader.salt(request, wire))

        def keep(response: Json) -> None:
            if wire.store is not False:
                given = (item.stored_form(token_hex(ID_BYTES)) for item in items)
                store.keep(salt.tenant, StoredResponse(response, history, tuple(given)))

        answer = ResponseAnswer(
            model.new_metadata("resp", "_"),
            token_bytes,
            wire.repeated(conversation, prompt.params),
            wire.response_options.cache_report,
            wire.packs_reasoning,
            conversation.tools,
            keep,
        )
        return await answering.respond(request, answer, prompt, stream=wire.stream)

    @router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesRequest))
    async def count_input_tokens(request: Request) -> Response:
        wire = await reader.read(request, ResponsesRequest)
        _, _, conversation = conversation_of(request, wire)
        salt = reader.salt(request, wire)
        tokens = await prompts.count_tokens(conversation, "input", salt)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    _add_stored_routes(router, store, reader.tenant)


def _add_stored_routes(
    router: APIRouter, store: ResponseStore, tenant_of: Callable[[Request], bytes]
) -> None:
    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise invalid("A stored response is not streamed.", "stream")
        stored = store.find(tenant_of(request), response_id)
        return await json_response(json_pieces(stored.response))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        store.forget(tenant_of(request), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        stored = store.find(tenant_of(request), response_id)
        return await json_response(json_pieces(_page(stored.input, request)))


def _page(items: tuple[Json, ...], request: Request) -> Json:
    """Return the items that the query selects. Raises ApiError for an invalid query."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(LISTED_ITEMS))
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc.", "order")
    if limit not in {str(number) for number in range(1, MAX_LISTED_ITEMS + 1)}:
        raise invalid(f"limit must be from 1 to {MAX_LISTED_ITEMS}.", "limit")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise invalid("No item of this response has this id.", "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": list(page),
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(page) < len(ordered),
    }
