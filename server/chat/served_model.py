"""The model that is served: what clients may call it, and what its makers recommend."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from server.protocol.answers import ResponseMetadata
from server.protocol.ollama.answer import NO_FACTS, ModelFacts
from server.protocol.wire_errors import model_not_found

ID_BYTES = 12
# Of Ollama's names, where nobody has written another.
DEFAULT_TAG = ":latest"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The names of the model, and the parameters that its makers recommend."""

    names: tuple[str, ...]
    """Names that match; the first one is the id."""
    defaults: dict[str, Any]
    """Sampling parameters of generation_config.json, for what a request leaves out."""
    stop_token_ids: frozenset[int]
    any_name: bool = False
    """Whether every name means this model: somebody else has chosen it by the client's name."""
    facts: ModelFacts = NO_FACTS
    """What its files say, for people and programs that choose a model."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """What the model is called in answers."""
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Return whether a client's name means this model. Slashes at the end do not count, nor
        does the tag that Ollama's clients add. An organisation before the name counts only if both
        names have one: ``name`` is ``org/name`` and ``org/alias`` is ``alias``, but ``mine/name``
        is not ``yours/name``."""
        if self.any_name:
            return True
        requested = _without_end(name)
        base = requested.rpartition("/")[2]
        names = [_without_end(name) for name in self.names]
        bases = [name.rpartition("/")[2] for name in names]
        return bool(requested) and (requested in names or base in names or requested in bases)

    def check(self, name: str | None) -> None:
        """Check the name of a model; none, or an empty one, means ours. Raises ApiError (404) for
        a model that is not served."""
        if name and not self.is_called(name):
            raise model_not_found(name)

    def new_metadata(self, prefix: str, separator: str = "-") -> ResponseMetadata:
        return ResponseMetadata(
            f"{prefix}{separator}{secrets.token_hex(ID_BYTES)}", int(time.time()), self.id
        )


def _without_end(name: str) -> str:
    return name.removesuffix(DEFAULT_TAG).rstrip("/")
