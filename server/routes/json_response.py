"""JSON that may be long: it is written in pieces, and others run between them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

# What is written at once: numbers and texts of a list, and lists and objects of one.
PLAIN_VALUES, CONTAINERS = 4096, 16
PIECE_BYTES = 65536


def json_pieces(value: Any) -> Iterator[bytes]:
    """Write a value. Its pieces, joined, are what ``to_json`` makes of it."""
    if not _is_long(value):
        yield to_json(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, member in value.items():
            yield before + to_json(name) + b":"
            yield from json_pieces(member)
            before = b","
        yield b"}"
    else:
        step = CONTAINERS if isinstance(value[0], dict | list) else PLAIN_VALUES
        before = b"["
        for start in range(0, len(value), step):
            part = value[start : start + step]
            if not any(map(_is_long, part)):
                yield before + to_json(part)[1:-1]
            else:
                for number, member in enumerate(part):
                    yield b"," if number else before
                    yield from json_pieces(member)
            before = b","
        yield b"]"


async def paced(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Join pieces to some that are worth a write. Others run between them."""
    gathered: list[bytes] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
            await asyncio.sleep(0)
    yield b"".join(gathered)


async def json_response(pieces: Iterator[bytes]) -> Response:
    body = b"".join([part async for part in paced(pieces)])
    return Response(body, media_type="application/json")


def _is_long(value: Any) -> bool:
    """Return whether there is a list in it that is not written at once."""
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    if not isinstance(value, list) or not value:
        return False
    if not isinstance(value[0], dict | list):
        return len(value) > PLAIN_VALUES
    return len(value) > CONTAINERS or any(map(_is_long, value))
