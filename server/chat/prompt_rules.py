"""What a prompt may be, whatever API it came by: its length, its token ids, how it is sampled."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import EngineLimits, SamplingParams
from server.chat.served_model import ServedModel
from server.protocol.common import MAX_BODY_TOKEN_IDS, SamplingFields
from server.protocol.wire_errors import ContextOverflowError, invalid


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
            fallback_seed=new_seed(),
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


def new_seed() -> int:
    """Draw a seed for a request that names none."""
    return secrets.randbits(63)
