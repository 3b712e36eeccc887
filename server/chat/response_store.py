"""Responses that clients read or continue by id, in memory, within a bound of bytes."""

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from server.config import LimitsSection
from server.protocol.answers import Json
from server.protocol.responses.items import Item, WireItem
from server.protocol.responses.request import ResponsesRequest
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import ApiError, invalid
from server.text.conversation import Conversation

ID_BYTES = 12
WIRE_ITEM: TypeAdapter[Any] = TypeAdapter(WireItem)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what it answered."""

    response: Json
    history: tuple[Json, ...]
    """The items before those of its request, from the beginning of the conversation."""
    input: tuple[Json, ...]
    """The items of its request, each with an id."""

    @property
    def own_items(self) -> Iterable[Json]:
        """The items of its request and its output."""
        return (*self.input, *self.response["output"])

    @property
    def items(self) -> tuple[Json, ...]:
        """The conversation, its own answer included."""
        return (*self.history, *self.own_items)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A stored response as JSON, so that its bytes can be counted."""

    response: bytes
    history: list[bytes]
    input: list[bytes]
    item_ids: list[str]
    """Ids of the items that came with it."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes. What it has in common with others counts for each of them."""
        return sum(map(len, (self.response, *self.history, *self.input)))

    @property
    def stored(self) -> StoredResponse:
        """The response, read from JSON."""
        history, given = map(from_json, self.history), map(from_json, self.input)
        return StoredResponse(from_json(self.response), tuple(history), tuple(given))


class ResponseStore:
    """The newest responses of every API key; none of them sees another's. The least recently used
    one goes first."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all keys together. 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()
        self._items: dict[tuple[bytes, str], tuple[str, bytes]] = {}
        """Items by their ids, each with the id of the newest response that it came with."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tenant: bytes, stored: StoredResponse) -> None:
        """Keep a response, and drop others for it. One that is too large alone is not kept.

        tenant: whose it is, as a salt names it.
        """
        kept = _Kept(
            to_json(stored.response),
            [to_json(item) for item in stored.history],
            [to_json(item) for item in stored.input],
            [item["id"] for item in stored.own_items],
        )
        if kept.num_bytes > self._max_bytes:
            return
        response_id = stored.response["id"]
        self._kept[tenant, response_id] = kept
        self.num_bytes += kept.num_bytes
        for item in stored.own_items:
            self._items[tenant, item["id"]] = (response_id, to_json(item))
        while self.num_bytes > self._max_bytes:
            self.forget(*next(iter(self._kept)))

    def find(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        """Return the response of that id, if it is kept and the tenant's."""
        found = self._kept.get((tenant, response_id))
        if found is None:
            return None
        self._kept.move_to_end((tenant, response_id))
        return found.stored

    def find_item(self, tenant: bytes, item_id: str) -> Json | None:
        found = self._items.get((tenant, item_id))
        if found is None:
            return None
        item: Json = from_json(found[1])
        return item

    def forget(self, tenant: bytes, response_id: str) -> bool:
        """Drop a response. Return whether it was kept."""
        kept = self._kept.pop((tenant, response_id), None)
        if kept is None:
            return False
        self.num_bytes -= kept.num_bytes
        for item_id in kept.item_ids:
            owner, _ = self._items.get((tenant, item_id), (None, None))
            if owner == response_id:
                del self._items[tenant, item_id]
        return True


class TenantStore:
    """The responses that one API key has stored."""

    def __init__(self, store: ResponseStore, tenant: bytes) -> None:
        """tenant: whose they are, as a salt names it."""
        self._tenant = tenant
        self._store = store

    def conversation(
        self,
        wire: ResponsesRequest,
        limits: LimitsSection,
        unseen: Unseen,
    ) -> tuple[tuple[Json, ...], list[Item], Conversation]:
        """Return the items before the request, its new items, and both in the neutral form. Raises
        ApiError. A begun answer is marked in the items, for requests that continue it."""
        history, placed = self.before(wire.previous_response_id), wire.items(self.item, unseen)
        before = [read_item(item) for item in history]
        conversation = wire.conversation(before, placed, limits, unseen)
        items = [item for _, item in placed]
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
        given = tuple(item.kept(secrets.token_hex(ID_BYTES)) for item in items)
        self._store.keep(self._tenant, StoredResponse(response, history, given))

    def forget(self, response_id: str) -> None:
        """Forget a response. Raises ApiError (404) where it is not stored."""
        if not self._store.forget(self._tenant, response_id):
            raise _not_stored()


def read_item(item: Json) -> Item:
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
