from typing import Any

import pytest
from pydantic_core import to_json

from server.chat.response_store import ResponseStore, StoredResponse
from server.protocol.wire_errors import ApiError

ME, YOU = b"me", b"you"


def item(name: str, text: str = "") -> dict[str, Any]:
    return {"type": "message", "id": name, "role": "user", "content": text}


def response(number: int, *, history: tuple[Any, ...] = (), text: str = "") -> StoredResponse:
    """Response ``resp_N``, of input ``in_N`` and output ``out_N``."""
    body = {"id": f"resp_{number}", "output": [item(f"out_{number}", text)]}
    return StoredResponse(body, history, (item(f"in_{number}"),))


def size_of(stored: StoredResponse) -> int:
    return len(to_json((stored.response, stored.history, stored.input)))


def found(store: ResponseStore, *numbers: int) -> list[int]:
    """Which of them are kept, without asking for any."""
    return [number for number in numbers if store.find_item(ME, f"out_{number}") is not None]


def assert_not_stored(store: ResponseStore, tenant: bytes, response_id: str) -> None:
    for use in (store.find, store.forget):
        with pytest.raises(ApiError) as caught:
            use(tenant, response_id)
        assert caught.value.status == 404


def test_a_response_is_found_by_its_key_alone() -> None:
    store, kept = ResponseStore(10_000), response(1)
    store.keep(ME, kept)
    assert_not_stored(store, YOU, "resp_1")
    assert_not_stored(store, ME, "resp_2")
    assert store.find(ME, "resp_1") == kept
    for name in ("out_1", "in_1"):
        one = store.find_item(ME, name)
        assert one is not None
        assert one.id == name
    assert store.find_item(YOU, "out_1") is None


def test_a_conversation_is_what_was_before_and_what_came_with_the_response() -> None:
    kept = response(2, history=(item("in_1"), item("out_1")))
    assert [part["id"] for part in kept.items] == ["in_1", "out_1", "in_2", "out_2"]


def test_whichever_has_not_been_asked_for_longest_goes_first() -> None:
    store = ResponseStore(2 * size_of(response(1)))
    store.keep(ME, response(1))
    store.keep(ME, response(2))
    store.find(ME, "resp_1")
    store.keep(ME, response(3))
    assert found(store, 1, 2, 3) == [1, 3]


def test_bytes_are_bounded_and_what_is_too_large_alone_drops_nothing() -> None:
    one = size_of(response(1, text="x" * 100))
    store = ResponseStore(2 * one)
    for number in range(1, 5):
        store.keep(ME, response(number, text="x" * 100))
    assert found(store, 1, 2, 3, 4) == [3, 4]
    large = response(5, text="x" * 2 * one)
    store.keep(ME, StoredResponse(large.response, (), (item("out_4"),)))
    assert_not_stored(store, ME, "resp_5")
    assert found(store, 3, 4, 5) == [3, 4]


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    store = ResponseStore(10_000)
    store.keep(ME, response(1))
    store.forget(ME, "resp_1")
    assert_not_stored(store, ME, "resp_1")
    assert store.find_item(ME, "out_1") is None


def test_an_item_that_was_sent_again_stays_with_the_newer_response() -> None:
    store = ResponseStore(10_000)
    store.keep(ME, response(1))
    again = StoredResponse({"id": "resp_2", "output": []}, (), (item("out_1"), item("out_1")))
    store.keep(ME, again)
    store.forget(ME, "resp_1")
    assert store.find_item(ME, "out_1") is not None
    assert store.find_item(ME, "in_1") is None
    store.forget(ME, "resp_2")
    assert store.find_item(ME, "out_1") is None


def test_a_store_without_room_keeps_nothing() -> None:
    store = ResponseStore(0)
    store.keep(ME, response(1))
    assert_not_stored(store, ME, "resp_1")
    assert store.find_item(ME, "out_1") is None
