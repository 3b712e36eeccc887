import asyncio
import json
from typing import Any, cast

from server.config import LimitsSection
from server.http.guards.connections import MAX_HEADER_BYTES, OverflowProtocol

LIMITS = LimitsSection(max_connections=2, keep_alive_s=60)


class Transport(asyncio.Transport):
    """What a protocol does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.did: list[str] = []

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.did.append("eof")

    def abort(self) -> None:
        self.did.append("abort")


async def test_one_too_many_is_told_so_at_once_and_may_still_close() -> None:
    others: set[OverflowProtocol] = set()
    protocol, transport = OverflowProtocol(LIMITS, others), Transport()
    protocol.connection_made(transport)
    head, body = transport.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in head.lower() + b"\r\n"
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert transport.did == ["eof"]
    assert others == {protocol}
    protocol.data_received(b"x" * MAX_HEADER_BYTES)
    assert transport.did == ["eof"]
    protocol.data_received(b"x")
    assert transport.did == ["eof", "abort"]
    protocol.connection_lost(None)
    assert others == set()


async def test_a_client_that_does_not_close_is_cut_off() -> None:
    limits = LIMITS.model_copy(update={"keep_alive_s": 0})
    protocol, transport = OverflowProtocol(limits, set()), Transport()
    protocol.connection_made(transport)
    async with asyncio.timeout(20):
        while "abort" not in transport.did:
            await asyncio.sleep(0)


async def test_even_those_that_are_too_many_are_not_too_many() -> None:
    others = cast(set[OverflowProtocol], {object(), object()})
    protocol, transport = OverflowProtocol(LIMITS, others), Transport()
    protocol.connection_made(transport)
    assert (transport.did, transport.written) == (["abort"], b"")
    protocol.connection_lost(None)
    assert len(others) == 2
