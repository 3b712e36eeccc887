"""An answer as a stream, in the form that its API has."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Protocol

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.chat.choices import Choices
from server.chat.generation import GenerationError
from server.protocol.answers import Answer, StreamForm
from server.protocol.wire_errors import generation_failed
from server.routes.json_response import json_pieces, paced

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": waiting\n\n"


def event(data: dict[str, Any], *, named: bool = False) -> bytes:
    """Write one event. named: by the type of its object."""
    return _head(data, named) + to_json(data) + b"\n\n"


def long_event(data: dict[str, Any], *, named: bool = False) -> Iterator[bytes]:
    yield _head(data, named)
    yield from json_pieces(data)
    yield b"\n\n"


def _head(data: dict[str, Any], named: bool) -> bytes:
    return (f"event: {data['type']}\n".encode() if named else b"") + b"data: "


@dataclass(frozen=True, slots=True)
class EventFraming:
    """Writes the objects of a stream as events."""

    media_type: ClassVar[str] = "text/event-stream"

    named: bool
    """Each by the type of its object; without names, [DONE] ends them."""

    @property
    def end(self) -> bytes:
        """What says that nothing is missing."""
        return b"" if self.named else DONE

    def written(self, data: dict[str, Any]) -> bytes:
        """Write one object."""
        return event(data, named=self.named)

    def pieces(self, data: dict[str, Any]) -> Iterator[bytes]:
        return long_event(data, named=self.named)

    def sign_of_life(self, answer: Answer) -> bytes:
        """Write what is sent in silence: a comment."""
        del answer
        return SIGN_OF_LIFE


class LineFraming:
    """Writes the objects of a stream as lines."""

    media_type: ClassVar[str] = "application/x-ndjson"
    end: ClassVar[bytes] = b""
    """The last object says itself that it is."""

    def written(self, data: dict[str, Any]) -> bytes:
        """Write one object."""
        return to_json(data) + b"\n"

    def pieces(self, data: dict[str, Any]) -> Iterator[bytes]:
        yield from json_pieces(data)
        yield b"\n"

    def sign_of_life(self, answer: Answer) -> bytes:
        """Write what is sent in silence: what means nothing, once more."""
        return b"".join(map(self.written, answer.first_chunks()))


HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Framing(Protocol):
    """Writes the objects of a stream."""

    @property
    def media_type(self) -> str:
        """Of the response."""

    @property
    def end(self) -> bytes:
        """What says that nothing is missing."""

    def written(self, data: dict[str, Any]) -> bytes:
        """Write one object."""

    def pieces(self, data: dict[str, Any]) -> Iterator[bytes]:
        """Yield one object in pieces."""

    def sign_of_life(self, answer: Answer) -> bytes:
        """Write what is sent in silence."""


FRAMINGS: dict[StreamForm, Framing] = {
    StreamForm.EVENTS: EventFraming(named=False),
    StreamForm.NAMED_EVENTS: EventFraming(named=True),
    StreamForm.LINES: LineFraming(),
}


class AnswerStream(StreamingResponse):
    """The answer, one write per step; a sign of life whenever ``ping_s`` pass in silence."""

    def __init__(self, choices: Choices, answer: Answer, ping_s: float) -> None:
        """ping_s: of silence, at most."""
        framing = FRAMINGS[answer.stream_form]
        super().__init__(
            _written(framing, choices, answer, ping_s),
            media_type=framing.media_type,
            headers=HEADERS,
        )
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. However it ends, the request ends with it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.close()


async def _written(
    framing: Framing, choices: Choices, answer: Answer, ping_s: float
) -> AsyncIterator[bytes]:
    """Yield an answer as it is sent. A fault ends the stream with an object of its own and without
    an end, so that clients can tell."""

    def written(objects: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(map(framing.written, objects))

    yield written(answer.first_chunks()) or framing.sign_of_life(answer)
    newest, last = time.monotonic(), b""
    try:
        async for deltas in choices.steps(ping_s):
            objects = written(c for delta in deltas for c in answer.chunks(delta))
            if choices.finished:
                last = objects  # goes with the end, in one write
                continue
            # Silence are also steps of which nothing can be sent yet.
            is_silent = not deltas or time.monotonic() - newest >= ping_s
            if out := objects or (framing.sign_of_life(answer) if is_silent else b""):
                yield out
                newest = time.monotonic()
        end = chain.from_iterable(map(framing.pieces, answer.last_chunks(choices.usage)))
        async for piece in paced(chain([last], end, [framing.end])):
            yield piece
    except GenerationError as error:
        yield written([answer.failure(generation_failed(str(error)))])
