"""The model that is served: what clients may call it, and what its makers recommend."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.types import EngineLimits, SamplingParams
from server.protocol.answers import ResponseMetadata
from server.protocol.common import MAX_BODY_TOKEN_IDS, SamplingFields
from server.protocol.ollama.answer import NO_FACTS, ModelFacts
from server.protocol.wire_errors import ContextOverflowError, UnknownModelError, invalid

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
            raise UnknownModelError(name)

    def new_metadata(self, prefix: str, separator: str = "-") -> ResponseMetadata:
        return ResponseMetadata(
            f"{prefix}{separator}{secrets.token_hex(ID_BYTES)}", int(time.time()), self.id
        )


def _without_end(name: str) -> str:
    return name.removesuffix(DEFAULT_TAG).rstrip("/")


@dataclass(frozen=True, slots=True)
class PromptRules:
    """What the model and the settings ask of prompts."""

    model: ServedModel
    engine: EngineLimits

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.engine.max_model_len

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that all texts of one body may have together, as its token ids may."""
        return max(MAX_BODY_TOKEN_IDS, self.max_model_len)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Check token ids. Raises ApiError for ids that the model does not have."""
        most = self.engine.vocab_size - 1
        if max(ids, default=0) > most:
            raise invalid(f"The {param} has a token id above {most}.", param)

    def check_prompt(self, ids: tuple[int, ...], param: str) -> None:
        """Check a prompt. Raises ApiError for one that is empty or can never fit."""
        if not ids:
            raise invalid(f"The {param} has no tokens.", param)
        if len(ids) >= self.max_model_len:
            raise ContextOverflowError(len(ids), self.max_model_len, param)

    def sampling_params(
        self,
        fields: SamplingFields,
        prompt_tokens: int,
        max_tokens: int | None,
        param: str,
        logprobs: int | None,
        *,
        least: int = 1,
    ) -> SamplingParams:
        """Return the engine's parameters for a prompt of so many tokens. fields: of the request.
        max_tokens, least: the longest answer that is asked for, and the shortest that may be; None
        and -1 are as long as fits. param: the wire's name of max_tokens. Raises ApiError."""
        return fields.sampling_params(
            max_tokens=answer_length(
                max_tokens, prompt_tokens, self.max_model_len, param, least=least
            ),
            logprobs=logprobs,
            vocab_size=self.engine.vocab_size,
            defaults=self.model.defaults,
            stop_token_ids=self.model.stop_token_ids,
        )


def answer_length(
    asked: int | None, prompt_tokens: int, max_model_len: int, param: str, *, least: int = 1
) -> int:
    """Return how many tokens may be generated. None and -1 mean: as many as fit; more than fit is
    cut.

    Raises ApiError for less than ``least``, -1 aside.
    """
    room = max_model_len - prompt_tokens
    if asked is None or asked == -1:
        return room
    if asked < least:
        raise invalid(f"{param} is {asked}; it must be at least {least}.", param)
    return min(asked, room)
