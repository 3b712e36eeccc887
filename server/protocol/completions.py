"""POST /v1/completions: a prompt, continued."""

from typing import Annotated

from pydantic import Field

from server.config import LimitsSection
from server.protocol.common import SamplingFields, Unsupported
from server.protocol.errors import invalid

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CompletionRequest(SamplingFields):
    """The body of a request."""

    prompt: str | list[TokenId]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: Unsupported = None
    suffix: Unsupported = None
    best_of: int | None = None

    def check(self, limits: LimitsSection) -> None:
        """What the types cannot say."""
        super().check(limits)
        if len(self.prompt) == 0:
            raise invalid("The prompt is empty.", "prompt")
        if self.best_of is not None and self.best_of != 1:
            raise invalid("best_of is not supported.", "best_of")

    @property
    def asked_length(self) -> int:
        """The longest answer that is wanted; OpenAI's default where none is named."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
