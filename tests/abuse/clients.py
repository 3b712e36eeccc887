"""Rude clients over bare sockets: each one tells how its connection ended.

They take the address of a server, and know nothing else of it.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

CHAT = "/v1/chat/completions"
READ_BYTES = 65536
SMALL_BUFFER_BYTES = 4096
GIVE_UP_S = 60.0
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a connection."""

    received: bytes
    seconds: float
    """Since it was opened."""
    was_reset: bool = False
    open_still: bool = False
    """Whether the client had enough before the server had."""
    sent_s: float = 0.0
    """Seconds from then until all was handed over, of a client that asks once."""

    @property
    def status(self) -> int | None:
        """Of the first answer; None where there was none."""
        words = self.received.split(b" ", 2)
        return int(words[1]) if words[0].startswith(b"HTTP/1.") and len(words) > 1 else None

    @property
    def statuses(self) -> list[int]:
        """Of all answers that came over the connection."""
        lines = self.received.split(b"HTTP/1.1 ")[1:]
        return [int(line[:3]) for line in lines]

    @property
    def body(self) -> bytes:
        """Of the first answer, with whatever came behind it."""
        return self.received.partition(b"\r\n\r\n")[2]

    def header(self, name: str) -> str | None:
        """Of the first answer."""
        for line in self.received.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return None

    @property
    def outcome(self) -> str:
        """In one word, for tables."""
        if self.open_still:
            return "open"
        if self.status is not None:
            return str(self.status)
        return "reset" if self.was_reset else "closed"


class Wire:
    """One connection, byte by byte."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened_s: float
    ) -> None:
        """opened_s: when the server cannot have known of it yet, by ``time.monotonic``."""
        self._reader = reader
        self._writer = writer
        self._opened_s = opened_s
        self.received = b""

    async def send(self, data: bytes) -> bool:
        """Whether the server still takes bytes."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return not self._writer.transport.is_closing()

    async def read_until(self, marker: bytes) -> bytes:
        """All that has come, once that is in it."""
        async with asyncio.timeout(GIVE_UP_S):
            while marker not in self.received:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise ConnectionError("the server closed the connection")
                self.received += data
        return self.received

    async def read_some(self, most: int) -> bytes:
        """What comes next; empty at the end."""
        async with asyncio.timeout(GIVE_UP_S):
            return await self._reader.read(most)

    async def ending(self, timeout_s: float = GIVE_UP_S) -> Ending:
        """Reads until the server ends the connection, or the time has passed."""
        was_reset = open_still = False
        try:
            async with asyncio.timeout(timeout_s):
                while data := await self._reader.read(READ_BYTES):
                    self.received += data
        except TimeoutError:
            open_still = True
        except OSError:
            was_reset = True
        return Ending(self.received, time.monotonic() - self._opened_s, was_reset, open_still)

    def half_close(self) -> None:
        """Nothing more will be sent."""
        self._writer.write_eof()

    def leave(self) -> None:
        """Closes as a program that is killed does: with a reset."""
        connection = self._writer.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


@asynccontextmanager
async def connected(port: int, *, small_buffer: bool = False) -> AsyncIterator[Wire]:
    """A connection to this machine. small_buffer: the system takes little of what is not read."""
    opened_s = time.monotonic()
    connection = socket.socket()
    if small_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    connection.setblocking(False)
    limit = SMALL_BUFFER_BYTES if small_buffer else READ_BYTES
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    except (OSError, asyncio.CancelledError):
        connection.close()
        raise
    try:
        yield Wire(reader, writer, opened_s)
    finally:
        writer.transport.abort()


def request(
    method: str = "GET", path: str = "/health", headers: Json | None = None, body: bytes = b""
) -> bytes:
    """A request as it should be; its Host is ours."""
    fields: Json = {"Host": "localhost"}
    if body:
        fields |= {"Content-Type": "application/json", "Content-Length": len(body)}
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chat_request(text: str = "Hello", path: str = CHAT, **fields: Any) -> bytes:
    """A chat of one message."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    return request("POST", path, body=json.dumps(body).encode())


# --- clients that never come to an end ----------------------------------------------------------


async def silent(port: int) -> Ending:
    """Connects, and says nothing."""
    async with connected(port) as wire:
        return await wire.ending()


async def slow_headers(port: int, pause_s: float) -> Ending:
    """Sends its head byte by byte."""
    return await _trickle(port, b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", pause_s)


async def slow_body(port: int, pause_s: float) -> Ending:
    """Sends its body byte by byte."""
    head = request("POST", CHAT, {"Content-Type": "application/json", "Content-Length": 100_000})
    return await _trickle(port, head, b'{"messages": [', pause_s)


async def _trickle(port: int, at_once: bytes, slowly: bytes, pause_s: float) -> Ending:
    async with connected(port) as wire:
        ending = asyncio.ensure_future(wire.ending())
        await wire.send(at_once)
        place = 0
        while not ending.done():
            await wire.send(slowly[place : place + 1] or b"x")
            place += 1
            await asyncio.wait({ending}, timeout=pause_s)
        return await ending


async def never_reading(port: int, **fields: Any) -> Ending:
    """Asks for a long stream, and takes nothing of it until the server has given up."""
    async with connected(port, small_buffer=True) as wire:
        await wire.send(chat_request(stream=True, **fields))
        # Nothing is read: that the connection is gone is seen by writing, which does no harm here.
        while await wire.send(b"\r\n"):
            await asyncio.sleep(0.05)
        return Ending(b"", time.monotonic() - wire._opened_s, was_reset=True)


# --- clients that send too much -----------------------------------------------------------------


async def huge_head(port: int, megabytes: int) -> Ending:
    """One header field without an end."""
    return await _flood(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"x", megabytes)


async def huge_body(port: int, megabytes: int) -> Ending:
    """In chunks, so that nothing announces its length."""
    head = request(
        "POST", CHAT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    )
    async with connected(port) as wire:
        chunk = b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n"
        return await _pour(wire, head, chunk, megabytes)


async def _flood(port: int, head: bytes, filling: bytes, megabytes: int) -> Ending:
    async with connected(port) as wire:
        return await _pour(wire, head, filling * 2**20, megabytes)


async def _pour(wire: Wire, head: bytes, piece: bytes, times: int) -> Ending:
    ending = asyncio.ensure_future(wire.ending())
    await wire.send(head)
    for _ in range(times):
        if ending.done() or not await wire.send(piece):
            break
    return await ending


# --- clients that leave, or come in numbers -----------------------------------------------------


async def leaving(port: int, after: bytes, data: bytes) -> None:
    """Sends, waits until that has come, and is gone. after: empty to leave at once."""
    async with connected(port) as wire:
        await wire.send(data)
        if after:
            await wire.read_until(after)
        wire.leave()


async def one_of_many(port: int, data: bytes, timeout_s: float = GIVE_UP_S) -> Ending:
    """Asks once, and reads to the end."""
    opened_s = time.monotonic()
    try:
        async with connected(port) as wire:
            await wire.send(data)
            sent_s = time.monotonic() - opened_s
            return replace(await wire.ending(timeout_s), sent_s=sent_s)
    except OSError:
        return Ending(b"", time.monotonic() - opened_s, was_reset=True)


async def crowd(port: int, size: int, data: bytes, timeout_s: float = GIVE_UP_S) -> list[Ending]:
    """So many at once."""
    return list(await asyncio.gather(*(one_of_many(port, data, timeout_s) for _ in range(size))))
