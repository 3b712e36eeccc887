"""POST /v1/responses, and the responses that are stored."""

import secrets
import time
from typing import Any

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.chat.prompting import ChatSpec, chat_prompt, count_tokens_of
from server.chat.response_store import ResponseStore, StoredResponse
from server.chat.salts import request_key
from server.chat.service import Service, parse
from server.protocol.answers import Json, ResponseMetadata
from server.protocol.responses.answer import ResponseAnswer
from server.protocol.responses.items import Item, WireItem
from server.protocol.responses.request import ResponsesRequest
from server.protocol.wire_errors import ApiError, invalid
from server.routes.answering import respond
from server.routes.json_response import json_pieces, json_response
from server.routes.openapi import takes
from server.text.conversation import Conversation

ID_BYTES = 12
MAX_LISTED_ITEMS = 100
LISTED_ITEMS = 20
WIRE_ITEM: TypeAdapter[Any] = TypeAdapter(WireItem)


class TenantStore:
    """The responses that one API key has stored."""

    def __init__(self, service: Service, store: ResponseStore, request: Request) -> None:
        self._tenant = service.salt(request, None).tenant
        self._config = service.config
        self._unseen = service.unseen(request, "responses")
        self._store = store

    def conversation(
        self, wire: ResponsesRequest
    ) -> tuple[tuple[Json, ...], list[Item], Conversation]:
        """Return the items before the request, its new items, and both in the neutral form. Raises
        ApiError. A begun answer is marked in the items, for requests that continue it."""
        history, items = self.before(wire.previous_response_id), wire.items(self.item)
        before = [read_item(item) for item in history]
        limits, efforts = self._config.limits, self._config.reasoning
        conversation = wire.conversation(before, items, limits, efforts, self._unseen)
        if conversation.continues and items:
            items = [*items[:-1], items[-1].model_copy(update={"prefix": True})]
        elif conversation.continues:
            history = (*history[:-1], history[-1] | {"prefix": True})
        return history, items, conversation

    def before(self, response_id: str | None) -> tuple[Json, ...]:
        """Return all items of the conversation that a response has ended. Raises ApiError (400)."""
        if response_id is None:
            return ()
        stored = self._store.find(self._tenant, response_id)
        if stored is None:
            raise invalid(
                "No response with this id is stored for this API key, or not any more (store: "
                "false, a restart, or too many others): send its conversation's items as input.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return stored.items

    def item(self, item_id: str) -> Item | None:
        """Return a stored item; None where there is none."""
        found = self._store.find_item(self._tenant, item_id)
        return None if found is None else read_item(found)

    def response(self, response_id: str) -> StoredResponse:
        """Return a stored response. Raises ApiError (404)."""
        stored = self._store.find(self._tenant, response_id)
        if stored is None:
            raise _not_stored()
        return stored

    def keep(self, response: Json, history: tuple[Json, ...], items: list[Item]) -> None:
        """Store a response with what it answered."""
        given = tuple(item.kept(secrets.token_hex(ID_BYTES)) for item in items)
        self._store.keep(self._tenant, StoredResponse(response, history, given))

    def forget(self, response_id: str) -> None:
        """Forget a response. Raises ApiError (404) where it is not stored."""
        if not self._store.forget(self._tenant, response_id):
            raise _not_stored()


def response_routes(service: Service) -> APIRouter:
    """Return the routes, for one service."""
    router = APIRouter()
    limits = service.config.limits
    store = ResponseStore(limits.max_stored_responses, limits.max_stored_response_bytes)

    @router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        wire = await parse(service, request, ResponsesRequest)
        service.check_model(wire.model)
        wire.check(limits)
        key = request_key(request.headers)
        service.check_room(1, key=key)
        tenant_store = TenantStore(service, store, request)
        history, items, conversation = tenant_store.conversation(wire)
        max_tokens, param = wire.asked_length
        chat = ChatSpec(conversation, wire, max_tokens, param, wire.logprobs, turns_param="input")
        prompt = await chat_prompt(service, chat, key)

        def keep(response: Json) -> None:
            if wire.store is not False:
                tenant_store.keep(response, history, items)

        answer = ResponseAnswer(
            new_metadata(service),
            service.tokenizer.token_bytes,
            wire.repeated(conversation, prompt.params),
            wire.response_options.cache_report,
            wire.packs_reasoning,
            keep,
        )
        return await respond(request, service, prompt, answer, stream=bool(wire.stream))

    @router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesRequest))
    async def count_input_tokens(request: Request) -> Response:
        wire = await parse(service, request, ResponsesRequest)
        service.check_model(wire.model)
        wire.check(limits)
        _, _, conversation = TenantStore(service, store, request).conversation(wire)
        salt = service.salt(request, wire.cache_salt)
        tokens = await count_tokens_of(service, conversation, "input", salt)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    @router.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise invalid("A stored response is not streamed.", "stream")
        stored = TenantStore(service, store, request).response(response_id)
        return await json_response(json_pieces(stored.response))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        TenantStore(service, store, request).forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        stored = TenantStore(service, store, request).response(response_id)
        return await json_response(json_pieces(_page(stored.input, request)))

    return router


def new_metadata(service: Service) -> ResponseMetadata:
    """Make the id, time and model of a new response."""
    return ResponseMetadata(
        f"resp_{secrets.token_hex(ID_BYTES)}", int(time.time()), service.model.id
    )


def read_item(item: Json) -> Item:
    """Read an item that was stored."""
    found: Item = WIRE_ITEM.validate_python(item)
    return found


def _not_stored() -> ApiError:
    return ApiError(
        404,
        "No response with this id is stored for this API key, or not any more.",
        type="not_found_error",
        param="response_id",
        code="response_not_found",
    )


def _page(items: tuple[Json, ...], request: Request) -> Json:
    """Return some of the items, as the query asks. Raises ApiError for a query that makes no
    sense."""
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
