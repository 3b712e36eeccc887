"""Responses that can be asked for, or continued by their id: in memory, and only so many."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

Json = dict[str, Any]


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
        """Those that came with it."""
        return (*self.input, *self.response["output"])

    @property
    def items(self) -> tuple[Json, ...]:
        """The conversation, its own answer included."""
        return (*self.history, *self.own_items)

    @property
    def num_bytes(self) -> int:
        """As JSON. What it has in common with others counts for each of them."""
        return len(to_json((self.response, self.history, self.input)))


class ResponseStore:
    """The newest responses of every API key; none of them sees another's. Whichever has not been
    asked for longest goes first."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Of all keys together. 0 keeps nothing."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, str], tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[tuple[bytes, str], tuple[str, Json]] = {}
        """Items by their ids, each with the id of the newest response that it came with."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tenant: bytes, stored: StoredResponse) -> None:
        """Takes a response in, and drops others for it. One that is too large alone is not kept.

        tenant: whose it is, as a salt names it.
        """
        size = stored.num_bytes
        if size > self._max_bytes:
            return
        response_id = stored.response["id"]
        self._kept[tenant, response_id] = (stored, size)
        self.num_bytes += size
        for item in stored.own_items:
            self._items[tenant, item["id"]] = (response_id, item)
        while self.num_bytes > self._max_bytes or len(self._kept) > self._max_responses:
            self.forget(*next(iter(self._kept)))

    def find(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        """The response of that id, if it is kept and the tenant's."""
        found = self._kept.get((tenant, response_id))
        if found is None:
            return None
        self._kept.move_to_end((tenant, response_id))
        return found[0]

    def find_item(self, tenant: bytes, item_id: str) -> Json | None:
        """An item of a kept response of the tenant."""
        found = self._items.get((tenant, item_id))
        return None if found is None else found[1]

    def forget(self, tenant: bytes, response_id: str) -> bool:
        """Drops a response. Returns whether it was kept."""
        found = self._kept.pop((tenant, response_id), None)
        if found is None:
            return False
        stored, size = found
        self.num_bytes -= size
        for item in stored.own_items:
            owner, _ = self._items.get((tenant, item["id"]), (None, None))
            if owner == response_id:
                del self._items[tenant, item["id"]]
        return True
