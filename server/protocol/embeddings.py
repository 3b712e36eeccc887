"""POST /v1/embeddings: one vector for each text."""

from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field
from pydantic_core import to_json

from engine.types import PrefixSalt, Request, SamplingParams
from server.config import LimitsSection
from server.protocol.common import MAX_PRIORITY, CachedFields, TextsOrIds, Whole
from server.protocol.fields import refused
from server.protocol.wire_errors import check_count, invalid

MAX_DIMENSIONS = 2**31 - 1
MAX_INPUTS = 2048
NO_TOKENS = SamplingParams(max_tokens=0)
Vectors = np.ndarray
"""A float32 array of shape ``[inputs, dimensions]``, in which each row has length 1."""


class EmbeddingRequest(CachedFields):
    """The body of POST /v1/embeddings. A field that is null counts as missing."""

    refused_fields = refused("embeddings")

    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    dimensions: Whole | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)
    priority: Whole | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        if self.normalize is False:
            raise invalid("normalize is false; embeddings have length 1 here.", "normalize")
        check_count(len(self.inputs), MAX_INPUTS, "inputs", "input")
        for number, one in enumerate(self.inputs):
            if not one:
                raise invalid(f"The {self.name_of(number)} is empty.", self.name_of(number))
        if not self.inputs:
            raise invalid("The input is empty.", "input")

    @property
    def inputs(self) -> "list[str] | list[list[int]]":
        if isinstance(self.input, str):
            return [self.input]
        first = self.input[0] if self.input else None
        return [self.input] if isinstance(first, int) else self.input  # type: ignore[return-value]

    def request(self, prompt_ids: tuple[int, ...], salt: PrefixSalt) -> Request:
        """Return the engine's request for one input's vector."""
        return Request(
            prompt_ids,
            (NO_TOKENS,),
            priority=self.priority or 0,
            salt=salt,
            pooling=True,
            beyond_queue=True,
        )

    def name_of(self, number: int) -> str:
        """Return the name of the input with this index, for error messages."""
        whole = isinstance(self.input, str) or self.inputs is not self.input
        return "input" if whole else f"input[{number}]"


def shorten(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Cut vectors to ``dimensions`` numbers and scale them to length 1. Zero vectors stay zero."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    short = vectors[:, :dimensions]
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    return short / np.where(lengths > 0, lengths, 1)


def embedding_pieces(
    vectors: Vectors, encoding_format: str | None, model: str, tokens: int
) -> Iterator[bytes]:
    """Yield the answer as JSON, one vector at a time. ``tokens`` is the number of input tokens."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    entries = (
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding_format)}
        for index, vector in enumerate(vectors)
    )
    return list_pieces({"object": "list", "model": model, "usage": usage}, "data", entries)


def list_pieces(head: dict[str, Any], name: str, entries: Iterable[Any]) -> Iterator[bytes]:
    """Yield a JSON object in pieces: the fields of ``head``, then the list ``name`` of entries."""
    yield to_json(head)[:-1] + b',"%s":[' % name.encode()
    for index, entry in enumerate(entries):
        yield (b"," if index else b"") + to_json(entry)
    yield b"]}"


def _encoded(vector: np.ndarray, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
