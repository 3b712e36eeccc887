import asyncio

import pytest
from structlog.contextvars import get_contextvars

from server.protocol.common import bind_request_id, current_request_id, new_request_id


def test_every_request_has_an_id_of_its_own() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("req_") for name in ids)


@pytest.mark.parametrize("given", ["a", "A-b_9", "x" * 64, "req_0123"])
async def test_a_plain_id_of_the_client_is_taken(given: str) -> None:
    assert bind_request_id([(b"X-Request-Id", given.encode())]) == given
    assert current_request_id() == given


@pytest.mark.parametrize(
    "given",
    [b"", b"x" * 65, b"a b", b"a\n", b"a\r\nx: y", b"a/b", b"\xff", "é".encode(), b"a,b", b"a=b"],
)
async def test_threat_22_any_other_id_of_the_client_is_not(given: bytes) -> None:
    assert bind_request_id([(b"x-request-id", given)]).startswith("req_")


async def test_threat_22_two_ids_are_none() -> None:
    twice = [(b"x-request-id", b"a"), (b"x-request-id", b"a")]
    assert bind_request_id(twice).startswith("req_")


async def test_the_log_carries_the_id_of_the_request_that_is_answered() -> None:
    async def answer(name: bytes) -> tuple[str, dict[str, object]]:
        bind_request_id([(b"x-request-id", name)])
        await asyncio.sleep(0)
        return current_request_id(), get_contextvars()

    for name, found in zip("ab", await asyncio.gather(answer(b"a"), answer(b"b")), strict=True):
        assert found == (name, {"request_id": name})


async def test_where_there_is_no_request_there_is_a_new_id_every_time() -> None:
    from structlog.contextvars import clear_contextvars

    clear_contextvars()
    assert current_request_id() != current_request_id()
