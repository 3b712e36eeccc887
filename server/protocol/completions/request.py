"""POST /v1/completions: prompts, continued."""

from collections.abc import Sequence
from typing import cast

from pydantic import Field

from server.config import LimitsSection
from server.protocol.common import OpenAISamplingFields, TextsOrIds, Whole
from server.protocol.fields import COMPLETION_FIELDS
from server.protocol.wire_errors import invalid

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5

PromptText = str | list[int]


class CompletionRequest(OpenAISamplingFields):
    """The body of a request."""

    rules = COMPLETION_FIELDS

    prompt: TextsOrIds
    logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    return_token_ids: bool | None = None
    best_of: Whole | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        super().check(limits)
        if self.best_of not in (None, self.response_options.choices):
            raise invalid("best_of is not supported, unless it is n: use n.", "best_of")
        if len(self.prompts) > limits.max_prompts:
            raise invalid(
                f"There are {len(self.prompts)} prompts; at most {limits.max_prompts} are read.",
                "prompt",
            )
        if not self.prompts:
            raise invalid("The prompt is empty.", "prompt")
        for number, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                raise invalid("The prompt is empty.", self.place(number))

    @property
    def prompts(self) -> Sequence[PromptText]:
        """What is to be continued, each as text or as ids; none for an empty list."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        return cast(Sequence[PromptText], [prompt] if is_one else prompt)

    @property
    def num_prompts(self) -> int:
        """How many prompts there are; each has all the answers."""
        return len(self.prompts)

    def place(self, number: int) -> str:
        """Return how errors name a prompt."""
        return "prompt" if len(self.prompts) == 1 else f"prompt[{number}]"

    @property
    def asked_length(self) -> int:
        """The longest answer that is wanted; OpenAI's default where none is named."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives that are wanted with each token of the prompt. They are also how a prompt is
        computed that nothing is to be said after."""
        if not self.echo:
            return None
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs
