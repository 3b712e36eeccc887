"""Keep the newest responses in memory, so that clients can read or continue a response by id."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from server.config import LimitsSection
from server.protocol.answers import Json
from server.protocol.common import IN_MEMORY
from server.protocol.responses.items import Item, WireItem
from server.protocol.responses.request import ResponsesRequest
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import ApiError, invalid
from server.text.conversation import Conversation
from server.text.newest import Newest

WIRE_ITEM: TypeAdapter[Any] = TypeAdapter(WireItem)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items (messages, calls and results) of the conversation before it."""

    response: Json
    history: tuple[Json, ...]
    """The conversation's items before the request."""
    input: tuple[Json, ...]
    """The request's own items, each with an id."""

    @property
    def own_items(self) -> Iterable[Json]:
        return (*self.input, *self.response["output"])

    @property
    def items(self) -> tuple[Json, ...]:
        """All items of the conversation, including the answer."""
        return (*self.history, *self.own_items)


class ResponseStore:
    """Stores the newest responses. A tenant (API key) can read only the tenant's own responses."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` limits the responses of all tenants together. With 0, nothing is stored."""
        self._responses: Newest[tuple[bytes, str], tuple[bytes, list[str]]] = Newest(max_bytes)
        """Maps a tenant and a response id to the response as JSON and the ids of its items."""
        self._items: dict[tuple[bytes, str], tuple[str, bytes]] = {}
        """Maps (tenant, item id) to (id of the newest response with this item, item as JSON)."""
        self._in_memory: set[tuple[bytes, str]] = set()
        """The responses of which nothing may be kept on disk."""

    def keep(self, tenant: bytes, stored: StoredResponse) -> None:
        """Store a response, and drop the least recently used ones to stay within the limit."""
        key = (tenant, stored.response["id"])
        text = to_json((stored.response, stored.history, stored.input))
        item_ids = [item["id"] for item in stored.own_items]
        dropped = self._responses.keep(key, (text, item_ids), len(text))
        for (owner, response_id), (_, ids) in dropped:
            self._drop_items(owner, response_id, ids)
        if key not in dict(dropped):
            if stored.response.get("prompt_cache_retention") == IN_MEMORY:
                self._in_memory.add(key)
            for item in stored.own_items:
                self._items[tenant, item["id"]] = (key[1], to_json(item))

    def find(self, tenant: bytes, response_id: str) -> StoredResponse:
        """Return a response. Raises ApiError (404) for an unknown id."""
        kept = self._responses.find((tenant, response_id))
        if kept is None:
            raise _not_stored()
        response, history, given = from_json(kept[0])
        return StoredResponse(response, tuple(history), tuple(given))

    def find_item(self, tenant: bytes, item_id: str) -> Item | None:
        _, item = self._items.get((tenant, item_id), ("", None))
        return None if item is None else read_item(from_json(item))

    def forget(self, tenant: bytes, response_id: str) -> None:
        """Drop a response. Raises ApiError (404) for an unknown id."""
        kept = self._responses.pop((tenant, response_id))
        if kept is None:
            raise _not_stored()
        self._drop_items(tenant, response_id, kept[1])

    def _drop_items(self, tenant: bytes, response_id: str, item_ids: list[str]) -> None:
        self._in_memory.discard((tenant, response_id))
        for item_id in item_ids:
            owner, _ = self._items.get((tenant, item_id), (None, None))
            if owner == response_id:
                del self._items[tenant, item_id]

    def with_retention(self, tenant: bytes, wire: ResponsesRequest) -> ResponsesRequest:
        """Return the request, which stays in memory if a response does that it takes up."""
        items = (self._items.get((tenant, one), ("", b"")) for one in wire.referenced)
        taken_up = {wire.previous_response_id, *(owner for owner, _ in items)}
        if any((tenant, owner) in self._in_memory for owner in taken_up):
            return wire.model_copy(update={"prompt_cache_retention": IN_MEMORY})
        return wire

    def conversation(
        self, tenant: bytes, wire: ResponsesRequest, limits: LimitsSection, unsupported: Unsupported
    ) -> tuple[tuple[Json, ...], list[Item], Conversation]:
        """Return the items before the request, the request's items, and the conversation of both.
        If the answer continues the last item, this item's ``prefix`` is set. Raises ApiError."""
        history = self._history(tenant, wire.previous_response_id)
        placed = wire.items(partial(self.find_item, tenant), unsupported)
        before = [read_item(item) for item in history]
        conversation = wire.conversation(before, placed, limits, unsupported)
        items = [item for _, item in placed]
        if conversation.continues and items:
            items = [*items[:-1], items[-1].model_copy(update={"prefix": True})]
        elif conversation.continues:
            history = (*history[:-1], history[-1] | {"prefix": True})
        return history, items, conversation

    def _history(self, tenant: bytes, response_id: str | None) -> tuple[Json, ...]:
        """Return the conversation's items up to and including a response. Raises ApiError (400)."""
        if response_id is None:
            return ()
        try:
            return self.find(tenant, response_id).items
        except ApiError as error:
            raise invalid(
                "No response with this id is stored for this API key, or not any more (store: "
                "false, a restart, or too many others): send its conversation's items as input.",
                "previous_response_id",
                "previous_response_not_found",
            ) from error


def read_item(item: Json) -> Item:
    wire: Item = WIRE_ITEM.validate_python(item)
    return wire


def _not_stored() -> ApiError:
    return ApiError(
        404,
        "No response with this id is stored for this API key, or not any more.",
        type="not_found_error",
        param="response_id",
        code="response_not_found",
    )
