"""Refusals reach clients that send all of a body before they look for an answer."""

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

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
