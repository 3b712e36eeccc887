"""Refusals reach clients that send all of a body before they look for an answer."""

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.config import Config
from server.guards import unread as module
from server.guards.unread import UnreadBody
from server.text.tokenizer import Tokenizer
from tests.abuse.servers import KEY, abused
from tests.server.harness import CHAT

LARGE = 10 * 1024**2
JSON = {"Content-Type": "application/json"}


def with_http_client(port: int, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", CHAT, body, JSON | headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def in_chunks(port: int, body: bytes, headers: dict[str, str]) -> int:
    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", CHAT, pieces(), JSON | headers, encode_chunked=True)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def with_urllib(port: int, body: bytes, headers: dict[str, str]) -> int:
    """It says that it closes the connection, and sends all at once."""
    url = f"http://127.0.0.1:{port}{CHAT}"
    asked = urllib.request.Request(url, body, JSON | headers)
    try:
        urllib.request.urlopen(asked).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    raise AssertionError("it was let in")


Client = Callable[[int, bytes, dict[str, str]], int]


@pytest.mark.parametrize("client", [with_http_client, in_chunks, with_urllib])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 413),
        ({"Authorization": "Bearer nobody"}, 401),
        ({"Origin": "https://elsewhere.example"}, 403),
    ],
)
async def test_a_refusal_is_read_by_who_is_still_sending(
    tokenizer: Tokenizer, client: Client, headers: dict[str, str], status: int
) -> None:
    settings = {"access": {"api_keys": KEY}}
    headers = {"Authorization": f"Bearer {KEY}"} | headers
    async with abused(tokenizer, settings) as server:
        for _ in range(3):
            found = await asyncio.to_thread(client, server.port, b" " * LARGE, headers)
            assert found == status


async def answered(headers: list[tuple[bytes, bytes]], pieces: list[Message]) -> list[Message]:
    """What is sent when an answer comes at once. pieces: what the client sends if it is asked."""
    sent: list[Message] = []
    incoming = iter(pieces)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def receive() -> Message:
        return next(incoming)

    async def send(message: Message) -> None:
        sent.append(message)

    await UnreadBody(app)({"type": "http", "headers": headers}, receive, send)
    return sent


def piece(size: int, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


async def test_the_answer_ends_when_the_body_does() -> None:
    pieces = [piece(5, True), piece(5, False)]
    sent = await answered([(b"content-length", b"10")], pieces)
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert b"".join(message.get("body", b"") for message in sent) == b"no"


async def test_who_leaves_or_sends_too_much_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 10)
    left: list[Message] = [{"type": "http.disconnect"}]
    for pieces in (left, [piece(5, True), piece(5, True)]):
        assert len(await answered([(b"transfer-encoding", b"chunked")], pieces)) == 3


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"0")], [(b"content-length", b"9"), (b"expect", b"x")]]
)
async def test_where_nothing_comes_nothing_is_waited_for(
    headers: list[tuple[bytes, bytes]],
) -> None:
    assert len(await answered(headers, [])) == 2


def test_the_settings_of_this_test_are_what_it_says() -> None:
    assert Config().limits.max_body_bytes < LARGE < module.MAX_UNREAD_BYTES
