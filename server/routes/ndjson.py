"""Objects of JSON, one in a line: https://github.com/ndjson/ndjson-spec.

There are no comments: clients read every line as JSON, an empty one too, and fail.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic_core import to_json

from server.protocol.answers import Answer
from server.routes.json_response import json_pieces


class LineFraming:
    """Writes the objects of a stream as lines."""

    media_type: ClassVar[str] = "application/x-ndjson"
    end: ClassVar[bytes] = b""
    """The last object says itself that it is."""

    def written(self, data: dict[str, Any]) -> bytes:
        """Write one object."""
        return to_json(data) + b"\n"

    def pieces(self, data: dict[str, Any]) -> Iterator[bytes]:
        """Yield one object in pieces."""
        yield from json_pieces(data)
        yield b"\n"

    def sign_of_life(self, answer: Answer) -> bytes:
        """Write what is sent in silence: what means nothing, once more."""
        return b"".join(map(self.written, answer.first_chunks()))
