"""POST /api/embed and /api/embeddings: texts in, vectors out."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import Field
from pydantic_core import to_json

from server.protocol.common import ListOf, Whole
from server.protocol.embeddings import MAX_DIMENSIONS, EmbeddingRequest
from server.protocol.ollama.fields import OLLAMA_EMBED_FIELDS, OLLAMA_EMBEDDINGS_FIELDS
from server.protocol.ollama.request import KeptFields


class OllamaEmbedRequest(KeptFields):
    """The body of /api/embed."""

    rules = OLLAMA_EMBED_FIELDS

    input: str | ListOf[str] | None = None
    dimensions: Whole | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)

    @property
    def neutral(self) -> EmbeddingRequest | None:
        """The same as /v1/embeddings has it; None where there is nothing to embed."""
        if not self.input:
            return None
        return EmbeddingRequest(
            input=self.input, dimensions=self.dimensions, cache_salt=self.cache_salt
        )


class OllamaEmbeddingsRequest(KeptFields):
    """The body of /api/embeddings, which is for older clients."""

    rules = OLLAMA_EMBEDDINGS_FIELDS

    prompt: str | None = None

    @property
    def neutral(self) -> EmbeddingRequest | None:
        """The same as /v1/embeddings has it; None where there is nothing to embed."""
        if not self.prompt:
            return None
        return EmbeddingRequest(input=self.prompt, cache_salt=self.cache_salt)


def embed_pieces(vectors: np.ndarray, head: dict[str, Any]) -> Iterator[bytes]:
    """Yield the answer of /api/embed as JSON, in pieces of a vector each. vectors: ``[inputs,
    dimensions]``. head: all else that it has."""
    yield to_json(head)[:-1] + b',"embeddings":['
    for index, vector in enumerate(vectors):
        yield (b"," if index else b"") + to_json(vector.tolist())
    yield b"]}"
