"""The served model: its names, its recommended sampling parameters, and the limits of prompts."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import EngineLimits, PrefixSalt, Request
from server.catalogue.names import match, nearest
from server.protocol.answers import ResponseMetadata
from server.protocol.common import MAX_BODY_TOKEN_IDS, SamplingFields
from server.protocol.ollama.answer import NO_FACTS, ModelFacts
from server.protocol.wire_errors import ContextOverflowError, UnknownModelError, invalid
from server.text.tokenizer import EncodedText

ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's names, and the sampling parameters that its makers recommend."""

    names: tuple[str, ...]
    """Names that requests may use for the model. The first name is the model's id."""
    defaults: dict[str, Any]
    """Sampling parameters of generation_config.json, for fields that a request omits."""
    stop_token_ids: frozenset[int]
    any_name: bool = False
    """True if every name is accepted, because a supervisor has already chosen the model."""
    facts: ModelFacts = NO_FACTS
    """Facts about the model's files, for people and programs that choose a model."""

    @property
    def id(self) -> str:
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Return True if a client's name means this model."""
        return self.any_name or any(match(name, [own]) for own in self.names)

    def check(self, name: str | None) -> None:
        """Raise ApiError (404) if a name means another model. An empty name means this model."""
        if name and not self.is_called(name):
            raise UnknownModelError(name, nearest(name, [self.id]))

    def new_metadata(self, prefix: str, separator: str = "-") -> ResponseMetadata:
        return ResponseMetadata(
            f"{prefix}{separator}{secrets.token_hex(ID_BYTES)}", int(time.time()), self.id
        )


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Checks prompts against the limits of the model and the engine."""

    model: ServedModel
    engine: EngineLimits

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def max_total_tokens(self) -> int:
        """The maximum number of tokens in all texts of a request body together."""
        return max(MAX_BODY_TOKEN_IDS, self.max_model_len)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for ids outside the model's vocabulary."""
        last_id = self.engine.vocab_size - 1
        if max(ids, default=0) > last_id:
            raise invalid(f"The {param} has a token id above {last_id}.", param)

    def check_prompt(self, ids: tuple[int, ...], param: str) -> None:
        """Raise ApiError if a prompt is empty, or leaves no room for an answer in the context."""
        if not ids:
            raise invalid("The prompt is empty.", param)
        if len(ids) >= self.max_model_len:
            raise ContextOverflowError(len(ids), self.max_model_len, param)

    def request(self, wire: SamplingFields, prompt: EncodedText, salt: PrefixSalt) -> Request:
        """Return the request for the answers to a prompt. Raises ApiError."""
        model = self.model
        return wire.request(prompt, salt, self.engine, model.defaults, model.stop_token_ids)
