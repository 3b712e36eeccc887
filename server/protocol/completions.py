"""POST /v1/completions: a prompt, continued."""

from pydantic import Field

from server.config import LimitsSection
from server.protocol.common import SamplingFields, TokenId
from server.protocol.errors import invalid
from server.protocol.fields import COMPLETION_FIELDS

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5


class CompletionRequest(SamplingFields):
    """The body of a request."""

    rules = COMPLETION_FIELDS

    prompt: str | list[TokenId]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def check(self, limits: LimitsSection) -> None:
        """What the types cannot say."""
        super().check(limits)
        if len(self.prompt) == 0:
            raise invalid("The prompt is empty.", "prompt")

    @property
    def asked_length(self) -> int:
        """The longest answer that is wanted; OpenAI's default where none is named."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
