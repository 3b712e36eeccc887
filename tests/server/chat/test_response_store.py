from typing import Any

import pytest
from pydantic_core import to_json

from server.chat.response_store import ResponseStore, StoredResponse
from server.protocol.wire_errors import ApiError

ME = b"me"


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
