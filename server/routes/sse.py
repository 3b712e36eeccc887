"""Server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html: an event is a ``data:`` line and an
empty one; a line that begins with a colon is a comment, which clients ignore.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic_core import to_json

from server.protocol.answers import Answer
from server.routes.json_response import json_pieces

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": waiting\n\n"


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
        """Yield one object in pieces."""
        return long_event(data, named=self.named)

    def sign_of_life(self, answer: Answer) -> bytes:
        """Write what is sent in silence: a comment."""
        del answer
        return SIGN_OF_LIFE
