"""An answer as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html: an event is a ``data:`` line and an
empty one; a line that begins with a colon is a comment, which clients ignore.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain
from typing import Any

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.chat.choices import Choices
from server.chat.generation import GenerationError
from server.protocol.answers import Answer
from server.protocol.wire_errors import generation_failed
from server.routes.json_response import json_pieces, paced

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": waiting\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: dict[str, Any], *, named: bool = False) -> bytes:
    """Write one event. named: by the type of its object."""
    return _head(data, named) + to_json(data) + b"\n\n"


def long_event(data: dict[str, Any], *, named: bool = False) -> Iterator[bytes]:
    """Yield one event in pieces."""
    yield _head(data, named)
    yield from json_pieces(data)
    yield b"\n\n"


def _head(data: dict[str, Any], named: bool) -> bytes:
    return (f"event: {data['type']}\n".encode() if named else b"") + b"data: "


class AnswerStream(StreamingResponse):
    """The answer, one write per step; a comment whenever ``ping_s`` pass in silence."""

    def __init__(self, choices: Choices, answer: Answer, ping_s: float) -> None:
        super().__init__(
            _events(choices, answer, ping_s), media_type="text/event-stream", headers=HEADERS
        )
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. However it ends, the request ends with it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.close()


async def _events(choices: Choices, answer: Answer, ping_s: float) -> AsyncIterator[bytes]:
    """Yield the events of an answer. A fault ends the stream with an event of its own and without
    [DONE], so that clients can tell."""
    named = answer.events_have_names

    def written(objects: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(event(data, named=named) for data in objects)

    yield written(answer.first_chunks()) or SIGN_OF_LIFE
    newest, last = time.monotonic(), b""
    try:
        async for deltas in choices.steps(ping_s):
            events = written(c for delta in deltas for c in answer.chunks(delta))
            if choices.finished:
                last = events  # goes with the end, in one write
                continue
            # Silence are also steps of which nothing can be sent yet.
            is_silent = not deltas or time.monotonic() - newest >= ping_s
            if out := events or (SIGN_OF_LIFE if is_silent else b""):
                yield out
                newest = time.monotonic()
        objects = answer.last_chunks(choices.usage)
        end = chain.from_iterable(long_event(data, named=named) for data in objects)
        async for piece in paced(chain([last], end, [] if named else [DONE])):
            yield piece
    except GenerationError as error:
        yield written([answer.failure(generation_failed(str(error)))])
