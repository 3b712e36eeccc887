"""How much the body of a request may bring, before anything is made of it.

What a body takes to be read grows with its values far more than with its bytes: an empty list
within a list is two characters, and a hundred bytes of memory. So values are counted first.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from server.config import LimitsSection
from server.protocol.wire_errors import ApiError, body_too_large, invalid
from server.text.json_object import outside_texts

# What the reader of JSON goes down to (jiter, in pydantic-core).
MAX_DEPTH = 200
# Looked at without a pause: some milliseconds.
PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one route."""

    max_bytes: int
    max_values: int
    """Numbers, texts, lists, objects and the like, wherever they are."""
    max_containers: int
    """The lists and objects among them, which take most."""
    max_depth: int = MAX_DEPTH
    """Lists and objects around a value; the reader refuses more."""

    async def check(self, body: bytes) -> None:
        """Check a body. Raises ApiError for one that has too much. Other tasks run meanwhile."""
        if len(body) > self.max_bytes:
            raise body_too_large(self.max_bytes)
        # A list has two characters, and one between it and the next.
        if len(body) <= 2 * min(self.max_values, self.max_containers):
            return
        values, containers, in_text = 1, 0, False
        for piece in _pieces(body):
            outside, in_text = outside_texts(piece, in_text)
            begun = outside.count(b"[") + outside.count(b"{")
            containers += begun
            values += begun + outside.count(b",")
            if values > self.max_values:
                raise _too_many(f"{self.max_values} values")
            if containers > self.max_containers:
                raise _too_many(f"{self.max_containers} lists and objects")
            await asyncio.sleep(0)


def limits_by_path(limits: LimitsSection) -> dict[str, BodyLimits]:
    """Return the limits of every route that takes a body."""
    most_bytes, most = limits.max_body_bytes, limits.max_body_values
    texts = BodyLimits(most_bytes, most, most)
    ids = BodyLimits(most_bytes, max(most, limits.max_body_token_ids), most)
    return {
        "/v1/chat/completions": texts,
        "/chat/completions": texts,
        "/v1/messages": texts,
        "/v1/messages/count_tokens": texts,
        "/v1/responses": texts,
        "/v1/responses/input_tokens": texts,
        "/tokenize": BodyLimits(limits.max_tokenize_bytes, most, most),
        "/api/chat": texts,
        "/api/generate": texts,
        "/api/embed": texts,
        "/api/embeddings": texts,
        "/api/show": texts,
        "/v1/completions": ids,
        "/completions": ids,
        "/v1/embeddings": ids,
        "/detokenize": ids,
    }


def _too_many(what: str) -> ApiError:
    return invalid(f"The body has more than {what}.", code="too_many_values")


def _pieces(body: bytes) -> Iterator[bytes]:
    """Yield the body in pieces of which none ends within an escape."""
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        escapes = len(body[start:end]) - len(body[start:end].rstrip(b"\\"))
        end += escapes % 2
        yield body[start:end]
        start = end
